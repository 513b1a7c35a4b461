"""`python -m megatron_pg integrations verl`: tells whether the installed verl has loaded the plugin, and its entries.

verl imports its plugins when it is imported itself, and logs an import that fails at DEBUG level only. The command
therefore imports verl, in the Python that runs it, and listens.
"""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from logging.handlers import BufferingHandler

from megatron_pg.integrations.verl import PREFIX, PROVEN_VERSIONS
from megatron_pg.loss.aggregation import AGGREGATIONS

MODULE = "megatron_pg.integrations.verl_plugin"


def main(arguments: Sequence[str]) -> int:
    """Print the report.

    Returns:
        0 where verl has all four policy losses and an estimator for prompt_mean, 1 otherwise.
    """
    about = "Is this package seen by a trainer?"
    parser = argparse.ArgumentParser(prog="megatron-pg integrations", description=about)
    parser.add_argument("trainer", choices=["verl"], help="the trainer to import and to ask")
    parser.parse_args(arguments)
    if importlib.util.find_spec("verl") is None:
        print("verl: not installed in this Python")
        return 1
    named = [point for point in entry_points(group="verl.plugins") if point.value == MODULE]
    if not named:
        print(
            f"plugin: no entry point of the group verl.plugins names {MODULE}; install this package again (pip install)"
        )
    heard, log = BufferingHandler(sys.maxsize), logging.getLogger("verl")
    level = log.level
    log.addHandler(heard)
    log.setLevel(logging.DEBUG)
    try:
        import verl
        from verl.trainer.ppo import core_algos
    except Exception as error:  # verl may lack any of its own requirements
        print(f"verl: its import fails: {type(error).__name__}: {error}")
        return 1
    finally:
        log.removeHandler(heard)
        log.setLevel(level)
    print(f"verl: {verl.__version__}, {os.path.dirname(str(verl.__file__))}")
    if named:
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        print(f"plugin: entry point {named[0].name} ({MODULE}); VERL_USE_EXTERNAL_PLUGINS={policy}")
    for message in (record.getMessage() for record in heard.buffer):
        if "plugin" in message:
            print(f"plugin: verl says: {message}")
    print(f"versions that were proven: {', '.join(PROVEN_VERSIONS)}")
    losses, estimators = (
        sorted(name for name in registry if name.startswith(PREFIX))
        for registry in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY)
    )
    print(
        f"policy losses (actor_rollout_ref.actor.policy_loss.loss_mode): {', '.join(losses) or 'none'}"
    )
    print(f"advantage estimators (algorithm.adv_estimator): {', '.join(estimators) or 'none'}")
    return 0 if len(losses) == len(AGGREGATIONS) and estimators else 1
