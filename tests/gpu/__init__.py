import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waits_refused() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
