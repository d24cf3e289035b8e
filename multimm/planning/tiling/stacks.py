"""Stacks of matrices: which batch blocks use the same block of an operand, and who keeps that.

Batch blocks of C are numbered ("flat"), in C order. An operand with all batch dimensions has its
own block for each; one without any, or with dimensions of 1, is broadcast along them:

    A (4, 1, m, k) @ B (3, k, n)    C's batch blocks   (0,0) (0,1) (0,2) (1,0) ... (3,2)
                                    flat                 0     1     2     3         11
                                    they use A's         0     0     0     1          3
                                    and B's              0     1     2     0          2
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

from multimm.planning.tiling.grid import Blocks, remembered


class Share(NamedTuple):
    """A batch block of an operand."""

    users: Blocks  #: batch blocks of C, in rising order
    matrices: int
    number: int  #: in the order of first users


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
            number,
        )
        for number, (key, flats) in enumerate(users.items())
    )


@remembered
def share_of(batch_blocks: tuple[Blocks, ...], shape: tuple[int, ...]) -> dict[int, Share]:
    """By batch block of C: the operand's batch block that it uses."""
    return {flat: share for share in shares(batch_blocks, shape) for flat in share.users}
