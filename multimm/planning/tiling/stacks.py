"""Stacks of matrices: which batch blocks use the same block of an operand, and who keeps that.

Batch blocks of C are numbered ("flat"), in C order. An operand with all batch dimensions has its
own block for each; one without any, or with dimensions of 1, is broadcast along them:

    A (4, 1, m, k) @ B (3, k, n)    C's batch blocks   (0,0) (0,1) (0,2) (1,0) ... (3,2)
                                    flat                 0     1     2     3         11
                                    they use A's         0     0     0     1          3
                                    and B's              0     1     2     0          2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from math import prod
from typing import NamedTuple

from multimm.planning.tiling.grid import Blocks, ceil_div, most_dealt, remembered


class Share(NamedTuple):
    """A batch block of an operand."""

    users: Blocks  #: batch blocks of C, in rising order
    matrices: int


@remembered
def shares(batch_blocks: tuple[Blocks, ...], shape: tuple[int, ...]) -> tuple[Share, ...]:
    """The batch blocks of an operand, in the order of their first users.

    Parameters
    ----------
    batch_blocks : tuple of Blocks
        Of C, per batch dimension.
    shape : tuple of int
        Of the operand, with rows and columns.
    """
    own = len(shape) - 2
    skipped = len(batch_blocks) - own
    users: dict[tuple[int, ...], list[int]] = {}
    for flat, index in enumerate(product(*(range(len(sizes)) for sizes in batch_blocks))):
        key = tuple(0 if shape[d] == 1 else at for d, at in enumerate(index[skipped:]))
        users.setdefault(key, []).append(flat)
    blocks = batch_blocks[skipped:]
    return tuple(
        Share(
            tuple(flats),
            prod(1 if shape[d] == 1 else blocks[d][at] for d, at in enumerate(key)),
        )
        for key, flats in users.items()
    )


@remembered
def share_of(batch_blocks: tuple[Blocks, ...], shape: tuple[int, ...]) -> dict[int, Share]:
    """By batch block of C: the operand's batch block that it uses."""
    return {flat: share for share in shares(batch_blocks, shape) for flat in share.users}


@remembered
def rows_of_a(
    batch_blocks: tuple[Blocks, ...], shape: tuple[int, ...], block_rows: int, p_m: int
) -> dict[tuple[int, int], Blocks]:
    """Grid rows that use a block of A, by the first batch block of C that does and block row.

    Parameters
    ----------
    batch_blocks : tuple of Blocks
        Of C, per batch dimension.
    shape : tuple of int
        Of A.
    block_rows : int
        Of each matrix.
    p_m : int
        Rows of the grid, to which block rows are dealt out, over all matrices, in turn.
    """
    return {
        (share.users[0], i): _in_turn((flat * block_rows + i for flat in share.users), p_m)
        for share, i in product(shares(batch_blocks, shape), range(block_rows))
    }


@remembered
def rows_of_b(
    batch_blocks: tuple[Blocks, ...], shape: tuple[int, ...], block_rows: int, p_m: int
) -> dict[int, Blocks]:
    """The same of a batch block of B, by the first batch block of C that uses it."""
    rows = range(block_rows)
    return {
        share.users[0]: _in_turn((flat * block_rows + i for flat in share.users for i in rows), p_m)
        for share in shares(batch_blocks, shape)
    }


def kept_of_a(
    share_of: dict[int, Share],
    rows_of: dict[tuple[int, int], Blocks],
    m_blocks: Blocks,
    steps: int,
    p_n: int,
) -> Counter[int]:
    """Elements of A, per unit of k, that the fullest worker of each grid row keeps, at most.

    Parameters
    ----------
    share_of, rows_of : dict
        As `share_of` and `rows_of_a` find them.
    m_blocks : Blocks
        Of each matrix's rows.
    steps : int
        Slabs in the longest part of k.
    p_n : int
        Columns of the grid.
    """
    # Plain loops over what does not change in them: most of the search for a stack was here.
    held: Counter[int] = Counter()
    for (first, i), rows in rows_of.items():
        turns = ceil_div(steps, len(rows) if len(rows) > 1 else p_n)
        for row in rows:
            held[row] += turns * share_of[first].matrices * m_blocks[i]
    return held


def kept_of_b(
    share_of: dict[int, Share], rows_of: dict[int, Blocks], columns: int, longest: int, steps: int
) -> Counter[int]:
    """The same of B; a grid column has so many block columns, of so many columns at most."""
    held: Counter[int] = Counter()
    for first, rows in rows_of.items():
        blocks = most_dealt(columns, steps, len(rows))
        for row in rows:
            held[row] += share_of[first].matrices * blocks * longest
    return held


def copies_of_a(
    share_of: dict[int, Share],
    rows_of: dict[tuple[int, int], Blocks],
    m_blocks: Blocks,
    columns: int,
) -> int:
    """Elements of A, per unit of k, that are sent in one wave, to so many columns of the grid."""
    return sum(
        share_of[first].matrices * m_blocks[i] * (len(rows) * columns - 1)
        for (first, i), rows in rows_of.items()
    )


def copies_of_b(share_of: dict[int, Share], rows_of: dict[int, Blocks]) -> int:
    """Matrices of B that are sent in one wave."""
    return sum(share_of[first].matrices * (len(rows) - 1) for first, rows in rows_of.items())


def _in_turn(rows: Iterable[int], p_m: int) -> Blocks:
    return tuple(dict.fromkeys(row % p_m for row in rows))
