"""torchrun, as the scripts here start it: `python examples/launch/torchrun.py [its flags] PROGRAM
[flags]`.

After SIGTERM the ranks have ten minutes, and not 30 seconds, to end their step and write a
checkpoint. What a rank has said is not said again: torchrun's own traceback would follow a refused
flag, and a run that was stopped as asked.
"""

import logging
import os
import sys

# Before torch reads it. As --shutdown-timeout, which torchrun has from torch 2.12 on: earlier ones
# wait 30 seconds.
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")

from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.run import parse_args, run  # noqa: E402

agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
agent.addFilter(lambda record: "forcefully" in record.msg)  # what was killed, not what has ended
try:
    run(parse_args(None))
except SignalException as error:
    sys.exit(128 + error.sigval)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        sys.exit(f"rank {rank}: {failure.message}")
    # A refusal has no error file, for which the ranks' main is under torch's @record, and has said
    # why.
    sys.exit(
        f"rank {rank} failed first" if os.path.isfile(failure.error_file) else failure.exitcode
    )
