"""`Ragged`: concatenated rows of different lengths, such as the ids that each token was sampled
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths. Row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: Tensor
    """The elements of all rows, [elements], on any device."""
    offsets: Tensor
    """The start of each row, [rows + 1] int64 on the host, so that sizes need no device
    synchronization."""

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def sizes(self) -> Tensor:
        """The elements of each row, [rows] int64 on the host."""
        return self.offsets.diff()

    def row(self, index: int) -> Tensor:
        """Return the elements of one row, as a view."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def row_of_element(self) -> Tensor:
        """Return the row of each element, [elements] int64 on the device of the values."""
        sizes = to_device(self.sizes, self.values.device)
        return torch.repeat_interleave(sizes, output_size=self.values.numel())

    def select(self, rows: Tensor) -> Ragged:
        """Select `rows`, int64 on the host, in the given order."""
        sizes = self.sizes[rows]
        offsets = offsets_of(sizes)
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], sizes)
        places = shift + torch.arange(shift.numel(), device="cpu")
        return Ragged(self.values[to_device(places, self.values.device)], offsets)

    def only(self, kept: Tensor) -> Ragged:
        """Empty the rows where `kept` [rows] bool is False. All tensors are on the host."""
        sizes = torch.where(kept, self.sizes, 0)
        return Ragged(self.values[torch.repeat_interleave(kept, self.sizes)], offsets_of(sizes))

    def slice(self, rows: slice) -> Ragged:
        """Take consecutive rows, as views."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def to(self, device: torch.device | str) -> Ragged:
        """Move the values to a device. The offsets stay on the host."""
        return Ragged(to_device(self.values, device), self.offsets)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of one or more parts."""
        sizes = torch.cat([part.sizes for part in parts])
        return cls(torch.cat([part.values for part in parts]), offsets_of(sizes))


def offsets_of(sizes: Tensor) -> Tensor:
    """Return the start of each row and the end of the last, [rows + 1] int64."""
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move the tensor to `device`. From the host to CUDA it goes through pinned memory, without
    waiting.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
