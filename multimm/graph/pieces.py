"""Operand blocks of what comes in other blocks: which pieces of those they are made of.

Each product may cut and join them for itself (`pieces`, `multiply_pieces`), or tasks of their own
do so once (`multimm.graph.recut`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

from dask._task_spec import List, Task, TaskRef

from multimm.errors import ShapeError
from multimm.gpu.add import DTYPES, add_partials
from multimm.gpu.layout import Shape
from multimm.gpu.reference import module_of
from multimm.graph.operand import Index
from multimm.graph.tasks import Block, Key, is_gpu, stream_for
from multimm.planning.grid import Blocks

Where = tuple[slice, ...]
#: Pieces of so many bytes are copied by our own kernel, as sums of one part: CuPy's assignment
#: reaches 1.5 TB/s for parts of rows on an H200, the kernel 3 to 4, but takes 40 us longer to start
#: on a worker. 32768 squares in pieces of 256 MiB take 409 ms in place of 419, in `tf32` 16384 in
#: pieces of 16 MiB 36 to 45 in place of 31 to 36.
LARGE = 2**27


@dataclass(frozen=True)
class Pieces:
    """What a task is given in place of an operand block.

    Parameters
    ----------
    blocks : list of array
        All that the block has a piece of.
    cuts : tuple of pair of Where
        Of each: which part of it is a piece, and where in the block that goes.
    sizes : tuple of tuple of int
        Of each: its shape. Of a larger one a part could be taken for what is no part of it.
    shape : tuple of int
        Of the block.
    """

    blocks: list[Block]
    cuts: tuple[tuple[Where, Where], ...]
    sizes: tuple[Shape, ...]
    shape: Shape

    def joined(self) -> Block:
        """The block: part of another one, or a new one, in the order of the current stream."""
        if len(self.blocks) == 1:
            check_shape(self.blocks[0], self.sizes[0])
            return self.blocks[0][self.cuts[0][0]]
        return self.copied()

    def copied(self) -> Block:
        """The block in memory of its own, in the order of the current stream."""
        for block, size in zip(self.blocks, self.sizes, strict=True):
            check_shape(block, size)
        xp = module_of(block=self.blocks[0])
        whole = xp.empty(self.shape, self.blocks[0].dtype)
        for block, (cut, at) in zip(self.blocks, self.cuts, strict=True):
            copy(block[cut], whole[at])
        return whole


def check_shape(block: Block, planned: Shape) -> None:
    """Raise `ShapeError` for a block that is not what its array's chunks say."""
    if block.shape != planned:
        raise ShapeError(
            f"a block of an operand has shape {block.shape}, its array's chunks say {planned}"
        )


def copy(source: Block, target: Block) -> None:
    """Write one block to another, in the order of the current stream."""
    if is_gpu(source) and source.dtype.name in DTYPES and source.nbytes >= LARGE:
        add_partials([source], out=target)
    else:
        target[...] = source


def pieces(name: str, chunks: tuple[Blocks, ...], where: Where) -> tuple[Task, list[Key]]:
    """A part of a task that makes `Pieces` of a rectangle, and the keys of what that takes.

    Parameters
    ----------
    name : str
        Of an array; its blocks' keys begin with it.
    chunks : tuple of Blocks
        Of the array.
    where : tuple of slice
        Of the array.
    """
    found = cuts_of(chunks, where)
    keys: list[Key] = [(name, *at) for at, _, _ in found]
    sizes = [size_of(chunks, at) for at, _, _ in found]
    return made_of(keys, [(cut, to) for _, cut, to in found], sizes, where), keys


def made_of(
    keys: Sequence[Key],
    cuts: Sequence[tuple[Where, Where]],
    sizes: Sequence[Shape],
    where: Where,
) -> Task:
    """A part of a task that makes `Pieces` of a rectangle, with what is cut from each of `keys`."""
    refs, shape = List(*map(TaskRef, keys)), tuple(at.stop - at.start for at in where)
    return Task(None, Pieces, refs, cuts=tuple(cuts), sizes=tuple(sizes), shape=shape)


def size_of(chunks: tuple[Blocks, ...], at: Index) -> Shape:
    """The shape of a block.

    >>> size_of(((4, 2), (3,)), (1, 0))
    (2, 3)
    """
    return tuple(blocks[i] for blocks, i in zip(chunks, at, strict=True))


def cuts_of(chunks: tuple[Blocks, ...], where: Where) -> list[tuple[Index, Where, Where]]:
    """Of each block that a rectangle has a part of: its index, which part, and where it goes."""
    axes = [_along(blocks, at) for blocks, at in zip(chunks, where, strict=True)]
    found = []
    for spans in product(*axes):
        at, cut, to = zip(*spans, strict=True)
        found.append((at, cut, to))
    return found


def _along(blocks: Blocks, at: slice) -> list[tuple[int, slice, slice]]:
    """Of each block that a stretch has a part of: its number, which part, and where it goes.

    >>> _along((4, 4, 4), slice(2, 8))
    [(0, slice(2, 4, None), slice(0, 2, None)), (1, slice(0, 4, None), slice(2, 6, None))]
    """
    ends = list(accumulate(blocks))
    if at.start == at.stop:  # of something without elements
        return [(0, slice(0, 0), slice(0, 0))]
    found = []
    for number in range(bisect_right(ends, at.start), len(blocks)):
        begin = ends[number] - blocks[number]
        if begin >= at.stop:
            break
        start, stop = max(begin, at.start), min(ends[number], at.stop)
        cut, to = slice(start - begin, stop - begin), slice(start - at.start, stop - at.start)
        found.append((number, cut, to))
    return found


def multiply_pieces(*operands: Any, verb: Callable[..., Block], **kwargs: Any) -> Block:
    """What `verb` makes of the operands once they are joined, those of them that come in pieces."""
    with stream_for(_first_block(operands)):
        return verb(*(x.joined() if isinstance(x, Pieces) else x for x in operands), **kwargs)


def _first_block(operands: Sequence[Any]) -> Block:
    first = operands[0]
    return first.blocks[0] if isinstance(first, Pieces) else first
