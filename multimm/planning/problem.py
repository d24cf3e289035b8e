"""The product to be planned: sizes, element sizes and the chunks that the operands come in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from multimm.errors import ShapeError
from multimm.planning.matrix import MatrixSpec, itemsize_of
from multimm.planning.tiling.grid import Blocks
from multimm.shapes import check_operands

#: Cost of one multiply-add beside float32's, by NumPy's name of the dtype in which sums are made.
#: Complex counts its four real products; what is longer than a double, which NumPy names by its
#: bits, has no BLAS: 550 to 600 on one core of an x86 server.
_COST = {
    "float64": 2.0,
    "complex64": 4.0,
    "complex128": 8.0,
    **dict.fromkeys(("float96", "float128", "complex192", "complex256"), 550.0),
}
#: Narrow integers go to units of floats (`multimm.gpu.integers`), by their format. Converting and
#: adding included they take 0.9 to 1.3 times as long as sgemm and dgemm (4000 squares, two cores
#: that others used, too). Tensor cores take as long as for packed TF32 (H100: 650 TFLOP/s of both).
_EXACT_COST = {"tf32": 0.09, "float32": 1.25, "float64": 2.5}
#: The same of bytes on INT8 tensor cores (H200: 1250 TOP/s of squares of 8192); and of each product
#: of bytes where 16 bits are cut into them.
_BYTES_COST, _CUT_COST = 0.043, 0.085
#: Multiplications from which on they are: as in `multimm.gpu.integers.in_bytes`.
CUT_INTO_BYTES = 2**35
#: Of these, those of tensor cores, whose operands each product packs for itself.
ON_TENSOR_CORES = "tf32"
#: Instead of a format, of wide integers: float64, if need be in digits (`multimm.gpu.integers`).
DIGITS = "digits"
#: What they cost, by bytes of a sum, where all have digits: how large they are no plan knows. Small
#: ones take as long as in float64 (2000 and 4000 squares on one core of an x86 server).
_DIGITS_COST = {4: 7.7, 8: 15.5}
#: What devices say that multiply large matrices by residues (`multimm.gpu.residues`), and the
#: precision of doubles there.
BY_RESIDUES = "float64"
#: The cost of packed blocks, by precision (H200: 184 and 597 TFLOP/s).
_PACKED_COST = {"float32": 0.29, "tf32": 0.09}
#: Bytes of a packed element, by precision: two FP16 parts of it, or one.
_PACKED_ITEMSIZE = {"float32": 4, "tf32": 2}


class Residues(NamedTuple):
    """Products of a dtype by residues, each of which packs its operands."""

    cost: float  #: as `_COST`
    itemsize: int  #: bytes of a packed element
    #: As in `multimm.gpu.residues.formats`.
    start: float
    packed: float
    joined: float

    def pays(self, m: int, n: int, k: int) -> bool:
        """Whether they are the fastest way to a product."""
        return m * n * k >= self.start + self.packed * (m + n) * k + self.joined * m * n


#: By the dtype of all three matrices (H200: 95 TFLOP/s of float64; 169 and 367 of complex numbers,
#: each of which has four products).
RESIDUES = {
    "float64": Residues(0.56, 14, 1.3e10, 700, 1000),
    "complex128": Residues(1.25, 30, 3e9, 200, 300),
    "complex64": Residues(0.58, 14, 1.3e10, 500, 800),
}
#: Batch blocks of a stack that may be used as they come, at most: arbitrary, each is a task.
MOST_BATCH_BLOCKS = 256
FLOAT32 = 4  # bytes of a real number
#: Blocks are packed for tensor cores once, where they are kept, if each k-tile is at least so long,
#: and so are the blocks of C on both sides: shorter ones do not pay for it.
PACKED_K_TILE, PACKED_SIDE = 256, 1024
#: A product packs its own operands where that takes less time than tensor cores save: packing moves
#: (m + n) k elements for m n k multiplications. On an H200 it pays from some 80 columns of a tall
#: operand on: 2^30 elements by 64 columns take 2.8 ms with multiply-adds, by 96 4.4 packed and 5.4.
PACKED_SHARE = 80
#: Multiplications of a matrix in a stack from which on it is multiplied by itself: as in
#: `multimm.gpu.kernel_selection`.
ALONE = 2**33


@dataclass(frozen=True)
class Problem:
    """op(A) of m x k times op(B) of k x n, `batch` times, in blocks that already exist.

    Parameters
    ----------
    a, b : MatrixSpec
        The operands as they are multiplied, transposes applied.
    dtype, accumulate : str
        Of the result, and of partial sums.
    c : MatrixSpec, optional
        The C of which beta C is added at the end.
    rereadable : tuple of bool
        For A and for B: blocks come straight from files or generators, so that they can be
        made when needed and again when needed twice.
    pack : str
        The precision for which blocks are packed for tensor cores, where they are large
        enough; empty if they never are.
    int8 : bool
        The GPUs multiply bytes, and operands are narrow integers, or of a dtype that they multiply
        by residues where that pays.
    exact : str
        The format in which integers are multiplied exactly, ``"tf32"`` on tensor cores, and
        ``"digits"`` for wide ones, which may be cut into several numbers of float64; empty for all
        other operands.
    symmetric : bool
        B is the transpose of A itself: the same values, not just the same shape.
    same : str
        A and B are one array: ``"plain"``, or B is its transpose, ``"turned"``. Else empty.
    awaited : bool
        Blocks of an operand are still to be made, nobody knows in what time.
    made_in_place : tuple of bool
        For A and for B: that is so, and they are made on the workers that `owners` says.
    held : tuple of bool
        For A and for B: its chunks lie in this process, which has no workers.
    uploaded : tuple of str
        Those of A, B and C, ``"a"`` and so on, that come from the host memory of GPU workers.
    downloaded : bool
        The result goes there.
    from_host : bool
        Operands stay there, and their blocks go up when they are needed, as if they were read.
    in_one : bool
        One task brings them to a GPU, multiplies them, and brings the result back.
    chunks : tuple of Blocks
        That the result is to come in, along all of its dimensions. Empty: those of the plan.
    """

    a: MatrixSpec
    b: MatrixSpec
    dtype: str = "float32"
    accumulate: str = "float32"
    c: MatrixSpec | None = None
    rereadable: tuple[bool, bool] = (False, False)
    pack: str = ""
    int8: bool = False
    exact: str = ""
    symmetric: bool = False
    same: str = ""
    awaited: bool = False
    made_in_place: tuple[bool, bool] = (False, False)
    held: tuple[bool, bool] = (False, False)
    uploaded: tuple[str, ...] = ()
    downloaded: bool = False
    from_host: bool = False
    in_one: bool = False
    chunks: tuple[Blocks, ...] = ()

    def __post_init__(self) -> None:
        check_operands(self.a.shape, self.b.shape)
        if self.symmetric and self.a.T.shape != self.b.shape:
            raise ShapeError(
                f"a symmetric product of shapes {self.a.shape} and {self.b.shape}: one must be the "
                "other transposed"
            )

    @cached_property
    def made_anywhere(self) -> tuple[bool, bool]:
        """For A and for B: tasks make its blocks, on workers that nobody has chosen yet."""
        a, b = (
            self.awaited and not (read or held or spec.owners)
            for spec, read, held in zip((self.a, self.b), self.rereadable, self.held, strict=True)
        )
        return a, b

    @cached_property
    def m(self) -> int:
        """Rows of C."""
        return self.a.rows

    @cached_property
    def n(self) -> int:
        """Columns of C."""
        return self.b.cols

    @cached_property
    def k(self) -> int:
        """Length of the contraction."""
        return self.a.cols

    @cached_property
    def batch_shape(self) -> tuple[int, ...]:
        """The broadcast batch dimensions."""
        pairs = zip_longest(self.a.shape[-3::-1], self.b.shape[-3::-1], fillvalue=1)
        return tuple(y if x == 1 else x for x, y in pairs)[::-1]

    @cached_property
    def batch(self) -> int:
        """Matrices in the result."""
        return prod(self.batch_shape)

    @property
    def batch_chunks(self) -> tuple[Blocks, ...]:
        """Chunks of each batch dimension, from the operand that is not broadcast along it."""
        chunks = []
        for axis in range(-len(self.batch_shape), 0):
            a, b = (
                spec.chunks[axis - 2] if len(spec.shape) >= 2 - axis else (1,)
                for spec in (self.a, self.b)
            )
            chunks.append(b if sum(a) == 1 and sum(b) != 1 else a)
        return tuple(chunks)

    @cached_property
    def out_bytes(self) -> int:
        """Bytes of an element of the result."""
        return itemsize_of(self.dtype)

    @cached_property
    def sum_bytes(self) -> int:
        """Bytes of an element of partial sums."""
        return itemsize_of(self.accumulate)

    @cached_property
    def flops(self) -> int:
        """A multiplication and an addition per element of k, over all matrices."""
        return 2 * self.batch * self.m * self.n * self.k

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of C."""
        return self.batch * self.m * self.n * self.out_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of all sums of C while they are added to: twice, for each is made anew."""
        return 2 * self.batch * self.m * self.n * self.sum_bytes

    @cached_property
    def chunked(self) -> bool:
        """Whether operands come in blocks: of matrices, or a stack in few."""
        cut = any(len(blocks) > 1 for spec in (self.a, self.b) for blocks in spec.chunks[-2:])
        return cut or self.batch_chunked

    @cached_property
    def batch_chunked(self) -> bool:
        """Whether a stack comes in blocks, and not in very many."""
        return 1 < prod(map(len, self.batch_chunks)) <= MOST_BATCH_BLOCKS

    @cached_property
    def packable(self) -> bool:
        """Whether the product is large enough for blocks that are packed, once or by each product.

        Complex ones are packed by each product alone, and residues.
        """
        plain = self.real_products == 1 and not self.by_residues
        return self._large and not self.batch_shape and plain

    @cached_property
    def alone(self) -> bool:
        """Whether each product packs its own matrices: large ones of a stack, or complex ones."""
        return self.packs and not self.packable

    @cached_property
    def packs(self) -> bool:
        """Whether block products are expected to run on operands packed for tensor cores."""
        if self.exact:
            return self.exact == ON_TENSOR_CORES
        return self._large and (not self.batch_shape or self.m * self.n * self.k >= ALONE)

    @property
    def _large(self) -> bool:
        """Each matrix is large enough, and there is a precision to pack for."""
        if self.by_residues or self.pack == BY_RESIDUES:
            return self.by_residues
        worth = self.m * self.n >= PACKED_SHARE * (self.m + self.n)
        return bool(self.pack) and self.k >= PACKED_K_TILE and worth

    @cached_property
    def by_residues(self) -> bool:
        """Whether block products are expected to run by residues."""
        known = None if self.exact or not self.int8 else RESIDUES.get(self.accumulate)
        return known is not None and known.pays(self.m, self.n, self.k)

    @property
    def on_int8(self) -> bool:
        """Whether INT8 tensor cores are expected to compute block products."""
        return self.by_residues or self.byte_products > 0

    @cached_property
    def byte_products(self) -> int:
        """How many products of bytes one of integers is; 0 where it is none."""
        count = self.a.itemsize * self.b.itemsize
        if not self.int8 or self.accumulate == "bool":
            return 0
        if self.exact == ON_TENSOR_CORES:
            return count if count == 1 else 0
        large = self.exact == "float64" and self.m * self.n * self.k >= CUT_INTO_BYTES
        return count if large else 0

    @cached_property
    def packed_itemsize(self) -> int:
        """Bytes of an element once it is packed, 0 where none ever is."""
        if self.by_residues:
            return RESIDUES[self.accumulate].itemsize
        if self.byte_products == 1:
            return 1
        return _PACKED_ITEMSIZE.get(self.scheme, 0)

    @property
    def scheme(self) -> str:
        """The precision that a block product packs its operands for, empty if it never does."""
        return self.pack or (self.exact if self.exact == ON_TENSOR_CORES else "")

    @cached_property
    def real_products(self) -> int:
        """Multiplications of real numbers for each one of the product's."""
        reals = [self.reals(role) for role in ("a", "b")]
        return prod(reals) if self.accumulate == "complex64" and not self.by_residues else 1

    def reals(self, role: str) -> int:
        """Real numbers in an element of an operand."""
        spec = self.a if role == "a" else self.b
        return 2 if spec.dtype.startswith("complex") else 1

    def written(self, role: str) -> int:
        """Bytes that an element of a complex operand is written as before it is packed.

        B's beside a complex A are squares of four numbers (`multimm.gpu.complex_gemm`). A's are
        not written where its rows are contiguous; nobody knows.
        """
        if self.accumulate != "complex64" or self.by_residues or self.reals(role) == 1:
            return 0
        return FLOAT32 * (self.real_products if role == "b" else self.reals(role))

    def packed_bytes(self, role: str) -> int:
        """Bytes of an operand's element once it is packed by a product."""
        return self.packed_itemsize * max(1, self.written(role) // FLOAT32)

    @property
    def relative_cost(self) -> float:
        """Time of one multiply-add beside a float32 one on the same device."""
        if self.exact == DIGITS:
            return _DIGITS_COST.get(self.sum_bytes, _EXACT_COST["float64"])
        if self.exact:
            if self.byte_products > 1:
                return _CUT_COST * self.byte_products
            return _BYTES_COST if self.byte_products else _EXACT_COST[self.exact]
        if self.by_residues:
            return RESIDUES[self.accumulate].cost
        if self.packs:
            return _PACKED_COST[self.pack] * self.real_products
        if self.pack == BY_RESIDUES:  # GPUs that say so multiply doubles as fast as float32
            return _COST[self.accumulate] / 2
        return _COST.get(self.accumulate, 1.0)
