"""How packed operands are laid out, and how kernels/split_pack.cu cuts one into tasks: integers.

Figures of the latter are what was fastest on an H200 (132 multiprocessors, 50 MB of L2).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SLAB = 64  #: of k; tiles are as high as they are wide
ROW_ALIGN = 128  #: rows are padded to a multiple
#: How many FP16 numbers stand for a float32, by precision.
PARTS = {"float32": 2, "tf32": 1}
PANEL = 64  #: rows
#: Residuals that a block may have; with more it keeps its source instead. Normal data has a handful
#: in 16384 x 16384, lognormal data of sigma 1 some 100. Arbitrary, but so many still cost little
#: beside the product: they are one of at most 1024 rows and 1024 terms.
RESIDUAL_CAP = 1024
#: Thread blocks that share a multiprocessor.
BLOCKS = 4
#: Thread blocks that find the maxima of a panel: more for few panels, so that there are as many
#: tasks, and for long ones. Who packs looks at what each of them has found, so there is a limit.
SPANS, TASKS, MAX_SPANS, LONGEST_SPAN = 16, 512, 64, 16
#: Slabs that a thread block packs, unless there are fewer tasks than `TASKS` then.
RUN = 2
#: How far the maxima are ahead of packing: so many tasks of both kinds, and so many that find
#: maxima. With fewer, those that pack wait; with more, L2 does not hold what is read again.
AHEAD, SPANS_AHEAD = 768, 128


def pack_defines(parts: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_pack.cu."""
    return (("PARTS", parts), ("BLOCKS", BLOCKS), ("CAP", RESIDUAL_CAP))


def residual_defines(parts: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_residuals.cu."""
    return (("PARTS", parts), ("CAP", RESIDUAL_CAP))


class Cut(NamedTuple):
    """How kernels/split_pack.cu cuts an operand into tasks; see common/two_passes.cuh."""

    panels: int  #: of 64 rows
    slabs: int  #: of 64 elements of k
    span: int  #: slabs in which one block finds maxima
    spans: int
    run: int  #: slabs that one block packs
    ahead: int  #: panels whose maxima are found before the first one is packed
    tasks: int


@functools.lru_cache(maxsize=1024)
def cut_for(rows: int, k: int) -> Cut:
    """Return how an operand of that size is cut."""
    panels, slabs = -(-rows // ROW_ALIGN) * (ROW_ALIGN // PANEL), -(-k // SLAB)
    if not panels or not slabs:
        return Cut(panels, slabs, 1, 0, 1, panels, 0)
    wanted = max(SPANS, -(-TASKS // panels), -(-slabs // LONGEST_SPAN))
    span = -(-slabs // min(wanted, MAX_SPANS))
    spans = -(-slabs // span)
    run = max(1, min(RUN, panels * slabs // TASKS))
    each = spans + -(-slabs // run)  # tasks of a panel
    ahead = min(panels, max(-(-AHEAD // each), -(-SPANS_AHEAD // spans)))
    return Cut(panels, slabs, span, spans, run, ahead, panels * each)
