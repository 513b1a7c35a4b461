"""Differences between versions of Megatron-Core. No other file compares version numbers."""

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
    """Megatron-Core is missing, or is a version that this package was not written for."""


@cache
def megatron_core_version() -> tuple[int, int, int]:
    """Return (major, minor, patch) of the Megatron-Core that can be imported; a checkout on
    PYTHONPATH has no metadata.

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
    """Read (major, minor, patch) from a version such as "0.19.2", "0.16.0rc1" or "0.18.0+abc123";
    refuse other text.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise UnsupportedMegatronError(f"{text!r} is no version; supported: {SUPPORTED_RANGE}")
    major, minor, patch = map(int, match.groups(default="0"))
    return major, minor, patch


def require_supported_version() -> None:
    """Raise `UnsupportedMegatronError` for a Megatron-Core that is missing or not supported; call
    it once at start.
    """
    version = megatron_core_version()
    if not OLDEST_SUPPORTED <= version[:2] < FIRST_UNSUPPORTED:
        raise UnsupportedMegatronError(
            f"megatron-core {'.'.join(map(str, version))} is installed; install a version in "
            f"{SUPPORTED_RANGE}"
        )


def exports_of_megatron(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build `__getattr__` and `__dir__` of a package whose exports, by module, are imported when
    used.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        megatron_core_version()
        return getattr(importlib.import_module(places[name]), name)

    return __getattr__, lambda: public_names(package, places)


def public_names(package: str, exports: Iterable[str]) -> list[str]:
    """List what `dir(package)` shows: exports, submodules that are imported, and special names."""
    own = vars(sys.modules[package]).items()
    kept = (name for name, x in own if isinstance(x, ModuleType) or name.startswith("__"))
    return sorted({*exports, *kept})


def _is_from(*version: int) -> bool:
    return megatron_core_version() >= version


masks_padding = partial(_is_from, 0, 16)
"""Blocks of layers hand a padding mask to their routers (`TransformerBlock.forward` of 0.16.1)."""
masks_expert_bias = partial(_is_from, 0, 20)
"""`TopKRouter._apply_expert_bias` takes a padding mask (MLM#6114); before, it fails."""
multiplies_by_ranks = partial(_is_from, 0, 19)
"""Per-token mode multiplies a router's loss by the ranks that share a micro-batch, as 0.19.2 does;
by tokens alone in transformer/moe/router.py of 0.16.1 to 0.18.2."""
derives_multi_token_labels = partial(_is_from, 0, 19)
"""Multi-token prediction is trained without labels, and has a loss scale of its own.
`process_mtp_loss` of 0.19.2 makes labels from the input. Without labels 0.17.1 and 0.18.2 leave the
loss out, older ones fail."""


def router_metrics() -> dict[str, Any]:
    """Return Megatron's numbers of routers, by name, in a dict that it keeps: in moe_utils.py
    before 0.18.
    """
    moe = "megatron.core.transformer.moe"
    if _has_module(f"{moe}.moe_logging"):
        tracker = importlib.import_module(f"{moe}.moe_logging").get_moe_metrics_tracker().metrics
    else:
        tracker = importlib.import_module(f"{moe}.moe_utils").get_moe_layer_wise_logging_tracker()
    return tracker  # type: ignore[no-any-return]


def needs_kept_pipeline_outputs() -> bool:
    """Tell whether interleaved PP needs `deallocate_pipeline_outputs=False`.

    pipeline_parallel/schedules.py up to 0.17.1 may free a chunk's output while its asynchronous
    send is still reading it.
    """
    return megatron_core_version() < (0, 18)


def _has_module(name: str) -> bool:
    megatron_core_version()
    return importlib.util.find_spec(name) is not None


has_hybrid_model = partial(_has_module, "megatron.core.models.hybrid")
"""There is a `HybridModel` (models/hybrid of 0.18.2 and 0.19.2), which 0.19 names as GPTModel's
successor."""
has_megatron_training = partial(_has_module, "megatron.training")
"""`megatron.training` is importable: from wheels of 0.17.1 on, and from any Megatron-LM
checkout."""
