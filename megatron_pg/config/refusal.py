"""Which rank of a job says why the job is refused, where every rank finds the same fault."""

from __future__ import annotations

import os
import time
from datetime import timedelta

GRACE_SECONDS = 1.0
"""What a rank that has nothing to say leaves the one that speaks, before its own end ends the job."""
STORE_TIMEOUT = timedelta(seconds=10)


def is_to_speak() -> bool:
    """Whether this rank is to say why the job is refused; any rank may call it, once, before it ends.

    torchrun ends all ranks as soon as one has ended, so the first that finds a fault says it: rank 0 may still be
    importing. The others find that out in the store that torchrun shares with its ranks
    (`TORCHELASTIC_USE_AGENT_STORE`), and return a second later. Under a launcher without one it is the first rank of
    each node.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get("LOCAL_RANK", "0") == "0"
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not of every build of torch

    key = "megatron_pg/refused/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, wait_for_workers=False, timeout=STORE_TIMEOUT)
        is_first = store.add(key, 1) == 1
    except (RuntimeError, KeyError, ValueError):  # better twice than not at all
        return True
    if not is_first:
        time.sleep(GRACE_SECONDS)
    return is_first
