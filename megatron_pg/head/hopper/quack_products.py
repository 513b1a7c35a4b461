"""The output layer's three matrix products with scaled exponentials, built on QuACK
(`quack-kernels`, PyPI).

`exponentials` has the formulas. The order of work and the tiles are from quack-kernels 0.6.5,
`linear_cross_entropy.scaled_exp_linear_cross_entropy_fwd`. The first call of a kernel compiles it
in seconds. QuACK caches it on disk.
"""

# QuACK and CUTLASS carry no types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc"

from __future__ import annotations

import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import identity_epi
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect
from quack.epilogue.scaled_exp import LOG2E, MaxLog2
from quack.operand_transform import a_transform
from quack.operand_transform.host import transform_a_operand
from torch import Tensor

from megatron_pg.head.hopper import MULTIPLE

STRIP = 64
"""The columns that share one factor."""
_K = 64


def tile_of(columns: int, with_dots: bool) -> int:
    """Return the columns that share one offset: the fastest tile of the first product that divides
    the columns (docs/records/benchmarks.md).
    """
    return next(w for w in (256 if with_dots else 192, 256, 192, MULTIPLE) if columns % w == 0)


class _Offset(MaxLog2):
    """A tile's largest logit times `scale`, rounded to an integer."""

    def __init__(self, name: str, scale: float) -> None:
        super().__init__(name)
        self.scale = scale

    def config_key(self) -> tuple[object, ...]:
        return (*super().config_key(), self.scale)

    @cute.jit
    def stat_value(self, total, group_cols):
        return cute.math.roundeven(total * Float32(self.scale))


def _prepass(acc: Any) -> dict[str, Any]:
    return {"offset": acc}


@functools.cache
def _epilogue(temperature: float, with_dots: bool) -> Any:
    """Build the first product's epilogue. The temperature is compiled in, because as an argument it
    would cost registers.
    """
    scale = LOG2E / temperature
    offset, target = _Offset("offset", scale), ColVecLoad("targets")
    sinks = {"sums": ColVecReduce("sums")}
    if with_dots:
        sinks["dots"] = ColVecReduce("dots", scaled=True)

    def exponentials(acc: Any, offset: Any) -> dict[str, Any]:
        exponential = pexp2(acc * scale - offset)
        return {"D": exponential, "sums": exponential, "target_logits": acc}

    def exponentials_and_dots(acc: Any, offset: Any) -> dict[str, Any]:
        exponent = acc * scale - offset
        exponential = pexp2(exponent)
        return {
            "D": exponential,
            "sums": exponential,
            "dots": (exponential, exponent),
            "target_logits": acc,
        }

    return gemm_epilogue(
        ops={"offset": offset},
        prepass=_prepass,
        prepass_outs=("offset",),
        reduces=sinks,
        outs={"target_logits": ColVecSelect("target_logits", idx_op=target)},
        extra_ops=(offset.out("offsets"), target),
    )(exponentials_and_dots if with_dots else exponentials)


@gemm_epilogue(ops={"factors": ColVecLoad("factors")})
def _times_row(acc: Any, factors: Any) -> dict[str, Any]:
    return {"D": acc * factors}


@a_transform(vec_size=8, args={"strips": "colvec_ktile"})
def _times_strip_of_row(x: Any, strips: Any) -> Any:
    return x * strips


@a_transform(vec_size=8, args={"strips": "kvec_m64"})
def _times_strip_of_column(x: Any, strips: Any) -> Any:
    return x * strips


def write_exponentials(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    out: Tensor,
    *,
    offsets: Tensor,
    sums: Tensor,
    dots: Tensor | None,
    target_logits: Tensor,
) -> None:
    """Write the first product of hidden states [rows, hidden] and weight [columns, hidden],
    bfloat16.

    `out` [rows, columns] bfloat16 is 2 ** (log2(e) z / temperature - offset of the tile), at most
    sqrt(2). Integer `offsets`, `sums` of a tile's exponentials and their `dots` with the exponents
    are [rows, tiles] float32. If a column in `targets` [rows] int64 is outside [0, columns), its
    row of `target_logits` [rows] float32 is not written.
    """
    tile = len(weight) // offsets.shape[1]
    arguments = {
        "offset": tile, "offsets": offsets, "sums": sums, "targets": targets,
        "target_logits": target_logits, **({} if dots is None else {"dots": dots}),
    }  # fmt: skip
    _epilogue(temperature, dots is not None).gemm(
        hidden, weight, out, epi_args=arguments,
        tile_M=MULTIPLE, tile_N=tile, cluster_M=2, cluster_N=1, pingpong=tile < 256,
    )  # fmt: skip


def write_hidden_gradient(
    exponentials: Tensor, strips: Tensor, factors: Tensor, weight: Tensor, out: Tensor
) -> None:
    """Write (exponentials times `factors` [rows] and `strips` [columns / STRIP, rows]) @ weight to
    `out` [rows, hidden].
    """
    left = transform_a_operand(_times_strip_of_row, exponentials, {"strips": strips}, MULTIPLE, _K)
    _times_row.gemm(
        left, weight.mT, out, epi_args={"factors": factors[None]}, transform_a=_times_strip_of_row,
        tile_M=MULTIPLE, tile_N=_tile_of_hidden(weight), tile_K=_K, cluster_M=2, cluster_N=1,
    )  # fmt: skip


def add_weight_gradient(
    exponentials: Tensor, strips: Tensor, scaled_hidden: Tensor, out: Tensor, *, add: bool
) -> None:
    """Write or add (exponentials times the strips' factors).T @ scaled hidden states to `out`
    [columns, hidden] float32.
    """
    left = transform_a_operand(
        _times_strip_of_column, exponentials.t(), {"strips": strips}, MULTIPLE, _K
    )
    identity_epi.gemm(
        left, scaled_hidden.mT, out, epi_args={},
        transform_a=_times_strip_of_column, add_to_output=add,
        tile_M=MULTIPLE, tile_N=_tile_of_hidden(out), tile_K=_K, cluster_M=1, cluster_N=2,
    )  # fmt: skip


def _tile_of_hidden(factor: Tensor) -> int:
    return 192 if factor.shape[1] % 192 == 0 else 256
