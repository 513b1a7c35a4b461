"""``megatron-pg explain``: which objective is really optimized, from lengths or rollout files and the launch flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from megatron_pg.explain.options import ExplainOptions, parse_options
from megatron_pg.explain.report import as_json, explain_step
from megatron_pg.explain.step import explained_step
from megatron_pg.explain.warnings import warnings_of

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Explains the step that a command line describes.

    Args:
        arguments: the command line after ``megatron-pg explain``.

    Returns:
        The exit status: 0, or 2 for flags that cannot be explained (the reason is on stderr).
    """
    try:
        _explain(parse_options(arguments))
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"megatron-pg explain: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(options: ExplainOptions) -> None:
    step = explained_step(options)
    reports, reasons = explain_step(step, options.config, options.parallelism)
    warnings = warnings_of(step, reports, options)
    if options.plot_path is not None:
        from megatron_pg.explain.plot import plot

        plot(step, reports, options.plot_path)
    if options.as_json:
        print(json.dumps(as_json(step, reports, reasons, warnings, options), indent=2))
        return
    from megatron_pg.explain.text import print_report

    print_report(step, reports, reasons, warnings, options)
