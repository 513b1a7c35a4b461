"""One prompt and its response, checked while it is still on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Values = Tensor | Sequence[float] | Sequence[int]
"""What a caller may give for a per-token field: a host tensor or a plain sequence of numbers."""

LOG_PROB_FIELDS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of the step: ``total_length = prompt_length + response_length`` tokens.

    Building it converts and checks every field, on the host, so that nothing has to be checked on a step's path.

    Raises:
        ValueError: naming the sample (``name``), the field, what was found and what was expected.
    """

    tokens: Tensor
    """[total_length] int64: the prompt's tokens, then the response's."""
    response_length: int
    """Response tokens; 0 is legal and contributes nothing, ``total_length`` is not (the prompt has a token)."""
    loss_mask: Tensor
    """[response_length] of 0 and 1, stored as bool: which response tokens the objective counts."""
    advantages: Tensor | float = 0.0
    """[response_length] float32, or one number for every response token."""
    old_log_probs: Tensor | None = None
    """[response_length] float32, nats: log-probs under the policy that the step starts from."""
    ref_log_probs: Tensor | None = None
    """[response_length] float32, nats: log-probs under the reference policy of the KL term."""
    rollout_log_probs: Tensor | None = None
    """[response_length] float32, nats: log-probs that the rollout engine reported."""
    group_index: int | None = None
    """The prompt group, any int64: all samples of one prompt in the step share it."""
    rollout_id: int | None = None
    """Samples with the same id, any int64, are one rollout; None makes this sample a rollout of its own."""
    name: str = "sample"
    """How error messages call this sample."""

    def __post_init__(self) -> None:
        tokens = self._vector("tokens", self.tokens, torch.int64)
        object.__setattr__(self, "tokens", tokens)
        self._check_lengths()
        object.__setattr__(self, "loss_mask", self._checked_loss_mask())
        advantages = self.advantages
        if isinstance(advantages, (int, float)):
            advantages = torch.full((self.response_length,), float(advantages))
        self._set_per_response_token("advantages", advantages)
        for field in LOG_PROB_FIELDS:
            if getattr(self, field) is not None:
                self._set_per_response_token(field, getattr(self, field))
        self._check_advantages()
        for field in ("group_index", "rollout_id"):
            object.__setattr__(self, field, self._identifier(field, getattr(self, field)))

    @property
    def total_length(self) -> int:
        """Tokens of prompt and response."""
        return self.tokens.numel()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.total_length - self.response_length

    @functools.cached_property
    def num_active_tokens(self) -> int:
        """Response tokens that the loss mask keeps; counted once, as every micro-batch asks for it."""
        return int(self.loss_mask.sum())

    def _vector(self, field: str, values: Values, dtype: torch.dtype) -> Tensor:
        """A one-dimensional host tensor, with an error that names the field where there is none to be had."""
        try:
            vector = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.name}: {field} is no sequence of numbers ({error})") from error
        if vector.dim() != 1:
            raise ValueError(
                f"{self.name}: {field} has shape {list(vector.shape)}, expected one dimension"
            )
        if vector.device.type != "cpu":
            raise ValueError(
                f"{self.name}: {field} is on {vector.device}, expected a host tensor: samples are checked and packed "
                "on the host, and the packed micro-batch is moved with PackedBatch.to(device)"
            )
        is_integer = not (vector.is_floating_point() or vector.dtype == torch.bool)
        if dtype == torch.int64 and vector.numel() and not is_integer:
            raise ValueError(f"{self.name}: {field} has dtype {vector.dtype}, expected integers")
        return vector.detach().to(dtype)

    def _check_lengths(self) -> None:
        if isinstance(self.response_length, bool) or not isinstance(self.response_length, int):
            raise ValueError(
                f"{self.name}: response_length is {self.response_length!r}, expected an integer"
            )
        if not 0 <= self.response_length:
            raise ValueError(
                f"{self.name}: response_length is {self.response_length}, expected 0 or more"
            )
        if self.prompt_length < 1:
            raise ValueError(
                f"{self.name}: {self.total_length} tokens with response_length {self.response_length} leave a prompt "
                f"of {self.prompt_length}: the prompt needs at least one token, whose logit predicts the response's "
                "first"
            )

    def _checked_loss_mask(self) -> Tensor:
        values = self._vector("loss_mask", self.loss_mask, torch.float64)
        self._check_size("loss_mask", values)
        wrong = ((values != 0) & (values != 1)).nonzero()
        if wrong.numel():
            position = int(wrong[0])
            raise ValueError(
                f"{self.name}: loss_mask[{position}] is {float(values[position])}, expected 0 or 1 (a mask of "
                "document ids or weights would be summed as token counts)"
            )
        return values.bool()

    def _set_per_response_token(self, field: str, values: Values) -> None:
        vector = self._vector(field, values, torch.float32)
        self._check_size(field, vector)
        object.__setattr__(self, field, vector)

    def _check_size(self, field: str, vector: Tensor) -> None:
        if vector.numel() != self.response_length:
            raise ValueError(
                f"{self.name}: {field} has {vector.numel()} values, expected one per response token "
                f"({self.response_length})"
            )

    def _check_advantages(self) -> None:
        """Advantages are data; a NaN there at an active token can only be an error of the script that made them."""
        advantages = torch.as_tensor(self.advantages)
        wrong = (self.loss_mask & ~torch.isfinite(advantages)).nonzero()
        if wrong.numel():
            position = int(wrong[0])
            raise ValueError(
                f"{self.name}: advantages[{position}] is {float(advantages[position])} at an active token, "
                "expected a finite number"
            )

    def _identifier(self, field: str, value: object) -> int | None:
        if value is None:
            return None
        try:
            number = int(value.__index__())  # type: ignore[attr-defined]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{self.name}: {field} is {value!r}, expected an integer") from error
        if isinstance(value, bool) or not -(2**63) <= number < 2**63:
            raise ValueError(f"{self.name}: {field} is {value!r}, expected a 64-bit integer")
        return number
