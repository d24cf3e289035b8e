"""How sgemm_ffma copies its operands to shared memory, as compile-time parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multimm.gpu.arch import STRIP
from multimm.gpu.strides import Axis, GemmSizes, ProductShape, Stack

Loads = dict[str, int]


def load_paths(trans: tuple[bool, bool], stacks: Sequence[Stack], axes: Sequence[Axis]) -> Loads:
    """How A and B lie: stored transposed, and copied 16 bytes at a time.

    Only what runs along m or n is copied like that, and only where every copy is aligned and
    none reaches over the edge.
    """
    wide = []
    turned = [flag != stack.transposed for flag, stack in zip(trans, stacks, strict=False)]
    for i, stack in enumerate(stacks[:2]):
        lengths = (stack.ld, stack.cols, *(axis.strides[i] for axis in axes))
        wide.append(stack.pointer % 16 == 0 and not any(length % STRIP for length in lengths))
    most = widest(*turned)
    return most | {
        f"WIDE_{x}": most[f"WIDE_{x}"] * fits for x, fits in zip("AB", wide, strict=True)
    }


def widest(trans_a: bool, trans_b: bool) -> Loads:
    """The same of operands that begin on 16 bytes, as do their rows."""
    return {
        "TRANS_A": int(trans_a),
        "WIDE_A": int(trans_a),
        "TRANS_B": int(trans_b),
        "WIDE_B": int(not trans_b),
    }


def alike(loads: Loads) -> Loads:
    """The same, with both operands copied 16 bytes at a time where they can be, or neither.

    >>> alike({"TRANS_A": 1, "WIDE_A": 0, "TRANS_B": 0, "WIDE_B": 1})
    {'TRANS_A': 1, 'WIDE_A': 0, 'TRANS_B': 0, 'WIDE_B': 0}
    """
    if loads == widest(bool(loads["TRANS_A"]), bool(loads["TRANS_B"])):
        return loads
    return loads | {"WIDE_A": 0, "WIDE_B": 0}


def sizes_of(shape: ProductShape, loads: Loads, lower: bool) -> GemmSizes:
    """Return the sizes of a product whose operands are copied like that."""
    return GemmSizes(
        shape.m, shape.n, shape.k, math.prod(shape.batch),
        scattered_a=not loads["TRANS_A"], scattered_b=bool(loads["TRANS_B"]),
        ragged_a=loads["TRANS_A"] > loads["WIDE_A"],
        ragged_b=not loads["TRANS_B"] and not loads["WIDE_B"], lower=lower,
    )  # fmt: skip
