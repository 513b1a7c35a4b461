"""vespo and turns beside the functions of VESPO's authors and of ROLL, from their sources.

git clone https://github.com/FloyedShen/VESPO $TRAINERS/VESPO    # aa1f304
TRAINERS=/folder python -m pytest -s tests/trainers/test_sequence_peers.py
"""

import ast
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_pg import PolicyLossConfig
from megatron_pg.loss import OBJECTIVES
from tests.fast.objectives_oracle import Sequence1
from tests.fast.sequences import flat_log_probs, package_batch, random_sequences, tokens_and_sums

from .sources import TRAINERS


def function_of(path: str, name: str, **names: Any) -> Callable[..., Any]:
    """The function of that name in a file, without the rest of the file; its annotations are not
    read.
    """
    if not (TRAINERS / path).exists():
        pytest.skip(f"needs {TRAINERS / path}")
    tree = ast.parse((TRAINERS / path).read_text())
    (node,) = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == name)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    namespace = {"torch": torch, **names}
    exec(compile(ast.Module([node], []), path, "exec"), namespace)
    return namespace[name]


def sequences() -> list[Sequence1]:
    """Turns are what masked tokens part, as ROLL has them."""
    drawn = []
    for s in random_sequences(5, spread=0.5):
        borders = [
            not before and now for before, now in zip([0, *s.loss_mask], s.loss_mask, strict=False)
        ]
        turns = torch.tensor(borders).cumsum(0).tolist() if borders else []
        drawn.append(dataclasses.replace(s, turn_ids=turns))
    return [s for s in drawn if s.active()]


def padded(rows: list[Any]) -> Tensor:
    return pad_sequence([torch.as_tensor(row).double() for row in rows], batch_first=True)


class Inputs:
    def __init__(self) -> None:
        self.sequences = sequences()
        self.flat = flat_log_probs(self.sequences)
        lengths = [len(s.loss_mask) for s in self.sequences]
        self.log_probs = padded(list(self.flat.split(lengths)))
        self.mask = padded([s.loss_mask for s in self.sequences]).bool()
        self.old = padded([s.old_log_probs for s in self.sequences])
        self.advantages = padded([s.advantages for s in self.sequences])

    def check(self, theirs: Tensor, **settings: Any) -> None:
        """The sum of the losses of active tokens, and its gradient for every log-prob."""
        config = PolicyLossConfig(**settings)
        wanted = torch.where(self.mask, theirs, 0.0).sum()
        expected = wanted.detach(), torch.autograd.grad(wanted, self.flat)[0]
        arguments = tokens_and_sums(config, package_batch(self.sequences), self.flat)
        total = OBJECTIVES[config.policy_loss].function(config, *arguments).loss.sum()
        found = total.detach(), torch.autograd.grad(total, self.flat)[0]
        errors = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
        print(f"\n{settings}: value {errors[0]:.1e}, gradient {errors[1]:.1e}")
        assert max(errors) < 1e-12 and expected[1].abs().max() > 0.1


def test_vespo_is_that_of_its_authors() -> None:
    """Under one advantage a sequence, of which theirs reads the first token's."""
    seen: dict[str, Tensor] = {}

    def agg_loss(losses: Tensor, *_: Any) -> Tensor:
        seen["losses"] = losses
        return losses.sum()

    path = "VESPO/recipe/vespo/code/core_algos.py"
    loss = function_of(path, "compute_policy_loss_vespo", agg_loss=agg_loss)
    inputs = Inputs()
    inputs.sequences = [
        dataclasses.replace(s, advantages=[s.advantages[s.active()[0]]] * len(s.loss_mask))
        for s in inputs.sequences
    ]
    advantages = padded([s.advantages for s in inputs.sequences])
    config = SimpleNamespace(policy_loss={})
    loss(inputs.old, inputs.log_probs, advantages, inputs.mask.long(), config=config)
    inputs.check(seen["losses"], policy_loss="vespo")


def test_the_turns_of_gspo_are_the_segments_of_roll() -> None:
    """Value alone: ROLL's mean carries gradient to all tokens of the segment, the sum of which is
    ours under one advantage.
    """
    mean = function_of("ROLL/roll/pipeline/agentic/utils.py", "compute_segment_masked_mean")
    inputs = Inputs()
    inputs.advantages = torch.ones_like(inputs.advantages)
    inputs.sequences = [
        dataclasses.replace(s, advantages=[1.0] * len(s.loss_mask)) for s in inputs.sequences
    ]
    ratio = mean(inputs.log_probs - inputs.old, inputs.mask.long()).exp()
    theirs = -torch.min(ratio, ratio.clamp(0.8, 1.2))
    config = PolicyLossConfig(policy_loss="gspo", sequence_unit="turn")
    arguments = tokens_and_sums(config, package_batch(inputs.sequences), inputs.flat)
    found = OBJECTIVES["gspo"].function(config, *arguments).loss
    wanted = theirs[inputs.mask]
    # Their mean divides by a count of 1e-8 more.
    torch.testing.assert_close(found[arguments[0].loss_mask], wanted, rtol=1e-7, atol=1e-7)
    pairs = (
        torch.autograd.grad(found.sum(), inputs.flat),
        torch.autograd.grad(wanted.sum(), inputs.flat),
    )
    torch.testing.assert_close(*pairs, rtol=1e-7, atol=1e-7)
