"""A matrix without its values: shape, dtype, chunks, where those lie, and how in a file."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, product
from math import prod

from multimm.errors import DTypeError, ShapeError, integer
from multimm.planning.tiling.grid import Blocks, remembered


def itemsize_of(dtype: str) -> int:
    """Bytes of an element, by NumPy's name of its dtype: planning needs no more of NumPy."""
    found = re.fullmatch(r"(?:u?int|float|bfloat|complex)(\d+)", dtype)
    if found is None and dtype != "bool":
        raise DTypeError(
            f"dtype {dtype!r} does not say how long an element is: use NumPy's full name, such as "
            "'float64', or give itemsize as well"
        )
    return 1 if found is None else int(found[1]) // 8


@dataclass(frozen=True)
class Storage:
    """Storage chunks of a matrix in a file, and what the reading of any block of it takes.

    Each chunk is decoded as a whole.

    Parameters
    ----------
    chunk : tuple of int or Blocks
        Shape of a storage chunk; of an axis along which they differ, all lengths. A read that
        touches one decodes all of it.
    itemsize : int
        Bytes of an element.
    decoding : int
        Bytes that a read holds while it decodes: the chunk as it is stored, decoded, and between.
    copied : int
        Bytes of decoded elements that are copied into the block at a time, at most.
    left : int
        Bytes of the chunk before that may not be free by then.
    codec : str
        What the speed of decoding depends on: a key of `multimm.planning.cost.reading.RATES`.
    """

    chunk: tuple[int | Blocks, ...]
    itemsize: int
    decoding: int
    copied: int = 0
    left: int = 0
    codec: str = ""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk, the largest."""
        return prod(x if isinstance(x, int) else max(x) for x in self.chunk) * self.itemsize

    @property
    def T(self) -> Storage:
        """The same of the transposed matrix."""
        return replace(self, chunk=(*self.chunk[:-2], self.chunk[-1], self.chunk[-2]))

    def held(self, block: int) -> int:
        """Bytes that the reading of a block of so many bytes takes beside those in flight.

        The block itself is among them: reads take long, and of unequal time on different workers,
        so what one has done with is still held for another that is behind.
        """
        return self.decoding + self.left + min(self.copied, block) + block

    def decoded(self, blocks: Sequence[Blocks]) -> int:
        """How many chunks are decoded when each of these blocks is read once."""
        return prod(map(_touched, blocks, self.chunk))


@remembered
def _touched(blocks: Blocks, chunk: int | Blocks) -> int:
    """Chunks that blocks along an axis touch, one that two of them touch counted twice.

    >>> _touched((4, 4), 4), _touched((3, 5), 4), _touched((2, 2, 2, 2), 8)
    (2, 3, 4)
    >>> _touched((4, 4), (3, 5))
    3
    """
    ends = [*accumulate(blocks)]
    spans = zip([0, *ends], ends, strict=False)
    if isinstance(chunk, int):
        return sum((end - 1) // chunk - start // chunk + 1 for start, end in spans if end > start)
    at = partial(bisect_right, [*accumulate(chunk)])
    return sum(at(end - 1) - at(start) + 1 for start, end in spans if end > start)


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix (or a stack of them) without its values.

    Parameters
    ----------
    shape : tuple of int
        The last two entries are rows and columns; the ones before are batch dimensions.
    dtype : str
        NumPy's name of the element type, such as ``"float32"``.
    itemsize : int, optional
        Bytes per element. Default: those of the dtype's name.
    chunks : tuple of tuple of int, optional
        Block sizes per dimension. Default: one block.
    owners : tuple of int, optional
        Where blocks lie on workers, or will: the worker of each block, in C order, by its place
        among the cluster's workers. Default: nobody knows.
    hosted : bool
        Blocks lie in host memory, also where GPUs multiply them. For products on paper: of arrays
        their blocks say so.
    storage : Storage, optional
        How it lies in the file that products read it from, if in chunks that are decoded as a
        whole.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    owners: tuple[int, ...] = ()
    hosted: bool = False
    storage: Storage | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "chunks", tuple(map(tuple, self.chunks)))
        if len(self.shape) < 2:
            raise ShapeError(f"a matrix has at least 2 dimensions, got shape {self.shape}")
        sizes = tuple(map(integer, self.shape))
        if any(size is None or size < 0 for size in sizes):
            raise ShapeError(f"a matrix of shape {self.shape}: sizes are integers, 0 or more")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "itemsize", self.itemsize or itemsize_of(self.dtype))
        if not self.chunks:
            object.__setattr__(self, "chunks", tuple((size,) for size in self.shape))
        if tuple(map(sum, self.chunks)) != tuple(self.shape):
            raise ShapeError(
                f"chunks {self.chunks} do not add up to shape {self.shape}: give the sizes of the "
                "blocks along each dimension, as in dask.array"
            )
        if self.owners and len(self.owners) != self.blocks:
            given = f"{len(self.owners)} owners of {self.blocks} blocks"
            raise ShapeError(f"{given}: give one for each block")

    @property
    def rows(self) -> int:
        """Rows of each matrix."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of each matrix."""
        return self.shape[-1]

    @cached_property
    def blocks(self) -> int:
        """Blocks of all matrices."""
        return prod(map(len, self.chunks))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def fullest(self) -> int:
        """Bytes of its blocks on the worker that has most of them; 0 where nobody knows."""
        held: Counter[int] = Counter()
        for owner, sizes in zip(self.owners, product(*self.chunks), strict=False):
            held[owner] += prod(sizes) * self.itemsize
        return max(held.values(), default=0)

    @property
    def column_owners(self) -> tuple[int, ...]:
        """The worker of each block of columns; empty unless each lies on one."""
        columns = len(self.chunks[1])
        first, rows = self.owners[:columns], range(0, len(self.owners), columns)
        return first if all(self.owners[row : row + columns] == first for row in rows) else ()

    def in_order(self, order: Sequence[int]) -> MatrixSpec:
        """The matrix with its blocks of columns in another order."""
        rows, columns = self.chunks
        starts = range(0, len(self.owners), len(columns))
        owners = tuple(self.owners[start + i] for start in starts for i in order)
        return replace(self, chunks=(rows, tuple(columns[i] for i in order)), owners=owners)

    @property
    def T(self) -> MatrixSpec:
        """The spec of the transposed matrix."""
        shape = (*self.shape[:-2], self.cols, self.rows)
        chunks = (*self.chunks[:-2], self.chunks[-1], self.chunks[-2])
        rows, cols = map(len, self.chunks[-2:])
        matrices = range(0, len(self.owners), rows * cols)
        owners = tuple(
            owner
            for start in matrices
            for col in range(cols)
            for owner in self.owners[start + col : start + rows * cols : cols]
        )
        storage = self.storage and self.storage.T
        return replace(self, shape=shape, chunks=chunks, owners=owners, storage=storage)
