"""Products for the kernels that compute D = alpha * (op(A) op(B) + P) + beta * C, and launches.

Operands are small integers: float32 is exact in any order, results must match bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cuda_on_cpu.operands import Far, Operand, difference, placed
from cuda_on_cpu.program import Buffer, Launch, Pointer
from multimm.gpu.arch import tiles_of

Arguments = list[object]


@dataclass(frozen=True)
class Case:
    """A launch, and what its buffers hold afterwards; inputs too: nobody writes to them."""

    launch: Launch
    expected: list[Buffer]

    def wrong(self, found: list[Buffer]) -> str:
        """What differs; empty if nothing does."""
        for number, (wanted, got) in enumerate(zip(self.expected, found, strict=True)):
            for offset, values in wanted.spans.items():
                what = difference(values, got.spans[offset])
                if what:
                    return f"{self.launch.what}: buffer {number}, byte {offset}: {what}"
        return ""


@dataclass(frozen=True)
class Problem:
    """A product; what is said of operands is in the order A, B, C, P, D."""

    m: int
    n: int
    k: int
    alpha: float = 1.0
    beta: float = 0.0
    c: bool = True
    p: bool = False
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = False
    extra: tuple[int, ...] = (0, 0, 0, 0, 0)  #: leading dimension - width
    offset: tuple[int, ...] = (0, 0, 0, 0, 0)  #: of the first element from 256-byte alignment
    gap: int = 0
    repeat: tuple[bool, ...] = (False, False, False, False, False)  #: one matrix for the batch
    far: bool = False  #: rows 2**31 + 4 elements apart
    k_step: int = 0  #: slices of k of this length, each with a D of its own
    lower: tuple[int, int] = (0, 0)  #: height and width of tiles; those above the diagonal stay

    @property
    def results(self) -> int:
        """How many D are computed."""
        return -(-self.k // self.k_step) if self.k_step else self.batch

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each operand as it is stored."""
        a = (self.k, self.m) if self.trans_a else (self.m, self.k)
        b = (self.n, self.k) if self.trans_b else (self.k, self.n)
        return (a, b, *[(self.m, self.n)] * 3)

    def with_whole_rows(self, a: bool, b: bool) -> Problem:
        """The same, but all rows of A transposed (of B) begin on 16 bytes and end there."""
        units = (4 if a else 1, 4 if b else 1, 1, 1, 1)

        def up(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + -x % unit for x, unit in zip(values, units, strict=True))

        m, n = self.m + -self.m % units[0], self.n + -self.n % units[1]
        gap = self.gap + -self.gap % max(units)
        return replace(self, m=m, n=n, extra=up(self.extra), offset=up(self.offset), gap=gap)

    def steps(self, tile: Tile) -> int:
        """How many k tiles all blocks walk through together: what it costs to run."""
        tiles = -(-self.m // tile.m) * -(-self.n // tile.n) * self.batch
        return tiles * (-(-self.k // tile.k) + 1)


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts D, and what it is launched with."""

    m: int
    n: int
    k: int
    threads: int
    shared: int = 0


#: From a problem, and pointer, leading dimension and stride of A, B, C, P, D, to the arguments.
Signature = Callable[[Problem, list[tuple[object, int, int]]], Arguments]


def batched(problem: Problem, matrices: list[tuple[object, int, int]]) -> Arguments:
    """Sizes and scalars, then pointer, leading dimension and stride of each matrix."""
    flat = [value for matrix in matrices for value in matrix]
    return [problem.m, problem.n, problem.k, problem.alpha, problem.beta, *flat]


def sliced(problem: Problem, matrices: list[tuple[object, int, int]]) -> Arguments:
    """The order of sgemm_ffma: with a length of the slices of k."""
    sizes, rest = batched(problem, matrices)[:3], batched(problem, matrices)[3:]
    return [*sizes, problem.k_step, *rest]


def rung(problem: Problem, matrices: list[tuple[object, int, int]]) -> Arguments:
    """The order of the ladder: one product, no P."""
    a, b, c, _, d = (matrix[:2] for matrix in matrices)
    sizes = [problem.m, problem.n, problem.k]
    return [*sizes, problem.alpha, *a, *b, problem.beta, *c, *d]


_ODD = {"extra": (1, 2, 3, 5, 1), "offset": (1, 2, 3, 1, 3)}
_WIDE = {"extra": (4, 8, 4, 4, 12), "offset": (4, 8, 0, 4, 4)}  # float4 everywhere


def problems(tile: Tile, *, full: bool, slices: bool = False) -> list[Problem]:
    """Problems that meet every edge of a tile; `full`: with P, null C, and batches."""
    edges = _edges(tile.m, tile.n, tile.k)
    if not full:
        return [replace(problem, p=False) for problem in edges]
    return edges + _batches(tile.m, tile.n, tile.k) + slices * _slices(tile.m, tile.n, tile.k)


def _edges(m: int, n: int, k: int) -> list[Problem]:
    return [
        Problem(1, 1, 1, **_ODD),
        Problem(m, n, k, p=True),
        Problem(2 * m, 2 * n, 5 * k, **_WIDE),
        Problem(m + 1, n - 1, 2 * k + 1, 2.0, -1.0, p=True, **_ODD),
        Problem(2 * m - 1, 3, k - 1, -1.0, 3.0, **_ODD),
        Problem(3, 2 * n + 1, 3 * k + 2, p=True, **_ODD),
        Problem(m - 3, n + 5, 0, math.inf, 2.0, **_ODD),  # nothing, times infinity, is nothing
        Problem(5, 7, 9, 0.0, 2.0, p=True, **_ODD),
        Problem(5, 7, 9, 0.0, 0.0, p=True, **_WIDE),
        Problem(3, 3, 3, 2.0, 1.0, p=True, far=True),
        Problem(9 * m + 1, 2 * n + 1, k + 1, **_ODD),  # more tile rows than walk as one band
        Problem(m + 4, n + 4, k + 8, 2.0, 3.0, **_WIDE),
    ]


def _batches(m: int, n: int, k: int) -> list[Problem]:
    a_and_c, b_and_p = (True, False, True, False, False), (False, True, False, True, False)
    return [
        Problem(m + 4, n + 4, k + 8, 2.0, c=False, p=True, **_WIDE),
        Problem(m + 4, n + 8, 4 * k, 2.0, 1.0, p=True, batch=2, gap=4, **_WIDE),
        Problem(7, 9, k + 3, 1.0, 1.0, c=False, batch=2, gap=3, **_ODD),
        Problem(5, 6, 0, -2.0, 1.0, p=True, **_ODD),
        Problem(9, 5, 7, 1.0, 2.0, p=True, batch=3, repeat=a_and_c),
        Problem(5, 9, 20, 1.0, 2.0, p=True, batch=2, repeat=b_and_p),
    ]


def _slices(m: int, n: int, k: int) -> list[Problem]:
    return [
        Problem(m + 3, n - 1, 5 * k + 3, 2.0, c=False, k_step=2 * k, **_ODD),
        Problem(m, n, 4 * k, c=False, k_step=k + 1, **_WIDE),
        Problem(3, 5, 2 * k, 0.0, c=False, k_step=k, **_ODD),
    ]


def squares(tile: Tile) -> list[Problem]:
    """Problems whose upper tiles are left out."""
    m, n, k = tile.m, tile.n, tile.k
    lower, longer = (m, n), max(m, n)
    return [
        Problem(1, 1, 1, lower=lower, **_ODD),
        Problem(2 * longer, 2 * longer, k, 2.0, 3.0, p=True, lower=lower, **_WIDE),
        Problem(3 * longer + 1, 3 * longer + 1, k + 1, -1.0, p=True, batch=2, gap=3, lower=lower,
                **_ODD),
        Problem(9 * m, 9 * m, 3, lower=lower, **_ODD),  # more tile rows than walk as one band
        Problem(2 * longer - 1, 2 * longer - 1, 3 * k, c=False, k_step=2 * k, lower=lower, **_ODD),
    ]  # fmt: skip


def product_case(entry: str, tile: Tile, signature: Signature, problem: Problem, seed: int) -> Case:
    """A problem as a launch of a kernel."""
    rng = np.random.default_rng(seed)
    operands = [_operand(problem, i, rng) for i in range(5)]
    present = (True, True, problem.c, problem.p, True)
    matrices = [
        x.arguments(i) if there else (None, 0, 0)
        for i, (x, there) in enumerate(zip(operands, present, strict=True))
    ]
    if problem.k_step:  # the next slice lies further along k in the same matrix
        for i, along_row in ((0, not problem.trans_a), (1, problem.trans_b)):
            pointer, ld, _ = matrices[i]
            matrices[i] = (pointer, ld, problem.k_step * (1 if along_row else ld))
    tiles = tiles_of(problem.m, problem.n, tile.m, tile.n, problem.lower != (0, 0))
    launch = Launch(
        entry, (tiles, 1, problem.results), tile.threads, signature(problem, matrices),
        [x.buffer for x in operands], tile.shared, seed, what=f"{entry} {problem}",
    )  # fmt: skip
    made = _result(problem, operands)
    if problem.lower != (0, 0):
        made = np.where(below(problem.m, problem.n, *problem.lower), made, operands[4].view)
    result = operands[4].holding(made)
    return Case(launch, [*launch.buffers[:4], result.buffer])


CAP = 5  #: elements of an operand that the parts need not carry


#: What packing has counted, by the way that a product takes then: kernels/common/refused.cuh.
COUNTS = {
    0: ((0, 0, 0, 0, 0, 0), (0, CAP, 0, CAP, 0, 0)),
    1: ((3, 0, 0, 0, 0, 0), (0, CAP + 1, 0, 0, 0, 0), (0, 0, 1, 9, 1, 0), (0, 1, 0, CAP + 2, 1, 7)),
    2: ((0, 1, 0, CAP + 2, 1, 0), (0, CAP + 1, 0, 0, 1, 0)),
}


def guarded(cases: Iterable[Case], *, way: int) -> Iterator[Case]:
    """The same launches of a kernel with GUARDED=CAP; some are not needed."""
    counted = [(which, some) for which, several in COUNTS.items() for some in several]
    for number, case in enumerate(cases):
        buffers = list(case.launch.buffers)
        which, some = counted[number % len(counted)]
        needed = which == way
        counts = Buffer.of(np.array(some, np.uint64))
        arguments = [*case.launch.arguments, Pointer(len(buffers))]
        launch = replace(case.launch, arguments=arguments, buffers=[*buffers, counts])
        yield Case(launch, [*(case.expected if needed else buffers), counts])


def _operand(problem: Problem, index: int, rng: np.random.Generator) -> Operand | Far:
    shape = (problem.results if index == 4 else problem.batch, *problem.shapes[index])
    if problem.far:
        empty: Operand | Far = Far(np.full(shape[1:], np.nan, np.float32), 2**31 + 4)
    else:
        empty = placed(
            shape, "f4", extra=problem.extra[index], offset=problem.offset[index],
            gap=problem.gap, repeat=problem.repeat[index],
        )  # fmt: skip
    # What BLAS says is not read holds NaN.
    read = problem.beta != 0 if index == 2 else problem.alpha != 0
    if index == 4 or not read:
        return empty
    values = rng.integers(-8, 9, (1 if problem.repeat[index] else problem.batch, *shape[1:]))
    return empty.holding(values.astype(np.float32))


def below(m: int, n: int, height: int, width: int) -> np.ndarray:
    """Where the tiles are that reach the diagonal of an m x n matrix."""
    return np.arange(n) // width * width < np.arange(m)[:, None] // height * height + height


def _result(problem: Problem, operands: list[Operand | Far]) -> np.ndarray:
    """Exactly, in float64."""
    a, b, c, p, _ = (x.view.astype(np.float64) for x in operands)
    a = a.swapaxes(1, 2) if problem.trans_a else a
    b = b.swapaxes(1, 2) if problem.trans_b else b
    if problem.k_step:
        starts = range(0, problem.k, problem.k_step)
        slices = [slice(start, start + problem.k_step) for start in starts]
        sums = np.stack([a[0][:, part] @ b[0][part] for part in slices])
        return problem.alpha * sums if problem.alpha != 0 else np.zeros_like(sums)
    total = np.zeros((problem.batch, problem.m, problem.n))
    if problem.alpha != 0 and (problem.k > 0 or problem.p):
        total += a @ b
        total = problem.alpha * (total + p if problem.p else total)
    return total + problem.beta * c if problem.c and problem.beta != 0 else total
