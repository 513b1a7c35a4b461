"""Differences between versions of Megatron-Core. Only this file compares version numbers."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

OLDEST_SUPPORTED = (0, 16)
FIRST_UNSUPPORTED = (0, 21)
SUPPORTED_RANGE = "megatron-core>=0.16,<0.21"


class UnsupportedMegatronError(ImportError):
    """Error for a missing or unsupported Megatron-Core."""


@cache
def megatron_core_version() -> tuple[int, int, int]:
    """Return (major, minor, patch) of the importable Megatron-Core.

    The version comes from the package, because a checkout on PYTHONPATH has no metadata.

    Raises:
        UnsupportedMegatronError: Megatron-Core cannot be imported.
    """
    try:
        from megatron.core import package_info
    except ImportError as error:
        raise UnsupportedMegatronError(
            f"importing megatron.core failed: {error}. Install it with `pip install "
            f"'{SUPPORTED_RANGE}'`."
        ) from error
    return parse_version(package_info.__version__)


def parse_version(text: str) -> tuple[int, int, int]:
    """Parse (major, minor, patch) from a version such as "0.19.2", "0.16.0rc1" or "0.18.0+abc123".

    Raises:
        UnsupportedMegatronError: the text is not a version.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise UnsupportedMegatronError(f"{text!r} is not a version. Install {SUPPORTED_RANGE}.")
    major, minor, patch = map(int, match.groups(default="0"))
    return major, minor, patch


def require_supported_version() -> None:
    """Raise `UnsupportedMegatronError` for a missing or unsupported Megatron-Core, at start."""
    version = megatron_core_version()
    if not OLDEST_SUPPORTED <= version[:2] < FIRST_UNSUPPORTED:
        raise UnsupportedMegatronError(
            f"megatron-core {'.'.join(map(str, version))} is not supported. Install "
            f"{SUPPORTED_RANGE}."
        )


def exports_of_megatron(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build `__getattr__` and `__dir__` of a package that imports its exports when used.

    `modules` has the exports by module.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        megatron_core_version()
        return getattr(importlib.import_module(places[name]), name)

    return __getattr__, lambda: public_names(package, places)


def public_names(package: str, exports: Iterable[str]) -> list[str]:
    """List the names for `dir(package)`: exports, imported submodules, and special names."""
    own = vars(sys.modules[package]).items()
    kept = (name for name, x in own if isinstance(x, ModuleType) or name.startswith("__"))
    return sorted({*exports, *kept})


def _is_from(*version: int) -> bool:
    return megatron_core_version() >= version


masks_padding = partial(_is_from, 0, 16)
"""Layer blocks pass a padding mask to their routers (`TransformerBlock.forward` in 0.16.1)."""
masks_expert_bias = partial(_is_from, 0, 20)
"""`TopKRouter._apply_expert_bias` accepts a padding mask (MLM#6114). Earlier versions fail."""
multiplies_by_ranks = partial(_is_from, 0, 19)
"""Per-token mode multiplies a router's loss by tokens and by the ranks that share a micro-batch, as
in 0.19.2. transformer/moe/router.py of 0.16.1 to 0.18.2 multiplies only by tokens."""
derives_multi_token_labels = partial(_is_from, 0, 19)
"""Multi-token prediction trains without labels and has its own loss scale. `process_mtp_loss` in
0.19.2 derives labels from the input. Without labels 0.17.1 and 0.18.2 omit the loss, and older
versions fail."""


def router_metrics() -> dict[str, Any]:
    """Return Megatron's own dict of router metrics by name. Before 0.18 it is in moe_utils.py."""
    moe = "megatron.core.transformer.moe"
    if _has_module(f"{moe}.moe_logging"):
        tracker = importlib.import_module(f"{moe}.moe_logging").get_moe_metrics_tracker().metrics
    else:
        tracker = importlib.import_module(f"{moe}.moe_utils").get_moe_layer_wise_logging_tracker()
    return tracker  # type: ignore[no-any-return]


def needs_kept_pipeline_outputs() -> bool:
    """Return whether interleaved PP needs `deallocate_pipeline_outputs=False`.

    Up to 0.17.1, pipeline_parallel/schedules.py may free a chunk's output before its asynchronous
    send has read it.
    """
    return megatron_core_version() < (0, 18)


def _has_module(name: str) -> bool:
    megatron_core_version()
    return importlib.util.find_spec(name) is not None


has_hybrid_model = partial(_has_module, "megatron.core.models.hybrid")
"""`HybridModel` exists (models/hybrid in 0.18.2 and 0.19.2). 0.19 names it GPTModel's successor."""
has_megatron_training = partial(_has_module, "megatron.training")
"""`megatron.training` is importable: in wheels from 0.17.1 on, and in any Megatron-LM checkout."""
