"""What is compiled on a GPU is compiled in its tests too.

`tests.distributed`, of which some of them take a helper, has `torch.compile` leave functions as
they are, for Megatron on a CPU.
"""

from collections.abc import Iterator

import pytest
import torch

compile_of_torch = torch.compile


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", compile_of_torch)
    with torch.compiler.set_stance("default"):
        yield
