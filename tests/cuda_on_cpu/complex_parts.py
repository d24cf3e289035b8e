"""Cases for the kernels of complex matrices: complex_parts, complex_mirror."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from cuda_on_cpu.elementwise import Places
from cuda_on_cpu.operands import Far, Operand
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Launch

Matrix = Operand | Far


def _pairs(places: Places, index: int, rng: np.random.Generator | None = None) -> Matrix:
    """A complex matrix, as 8 bytes an element; without values nobody may read it."""
    made = places.operand(index, "u8", vector=1)
    if rng is None:
        return made
    values = rng.standard_normal((1, places.rows, 2 * places.cols)).astype("f4")
    values[0, 0, 0], values[0, -1, -1] = -0.0, 1e-42  # a zero with a sign, and a subnormal number
    return made.holding(values.view("u8"))


def _complex(matrix: Matrix) -> np.ndarray:
    return np.ascontiguousarray(matrix.view[0]).view("c8")


def _reals(rows: int, cols: int, rng: np.random.Generator | None = None) -> Matrix:
    made = Places(rows, cols).operand(0, "f4", vector=1)
    return made if rng is None else made.holding(
        rng.standard_normal((1, rows, cols)).astype("f4"))  # fmt: skip


def _times(alpha: float, x: np.ndarray) -> np.ndarray:
    """Each part by itself, as the kernels do."""
    return (np.float32(alpha) * np.ascontiguousarray(x).view("f4")).view("c8")


def parts_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Squares of four numbers, rows of parts, and back, to the last bit."""
    threads, span = defines["THREADS"], defines["THREADS"] * defines["UNROLL"]
    rng = np.random.default_rng(11)
    shapes = [
        Places(1, 1), Places(3, 2, extra=(1,), offset=(1,)), Places(2, span),
        Places(1, 2 * span + 1), Places(span + 1, 1, extra=(2,)), Places(7, threads - 1),
        Places(5, threads + 1, extra=(3,)), Places(3, 2, far=True),
    ]  # fmt: skip
    for seed, places in enumerate(shapes):
        rows, cols = places.rows, places.cols
        grid = (-(-rows * cols // span), 1, 1)
        x = _pairs(places, 0, rng)
        z = _complex(x)
        s01, s10, s11 = (float(sign) for sign in [*itertools.product((1, -1), repeat=3)][seed])
        squares = np.empty((rows, 2, cols, 2), "f4")
        squares[:, 0, :, 0], squares[:, 0, :, 1] = z.real, s01 * z.imag
        squares[:, 1, :, 0], squares[:, 1, :, 1] = s10 * z.imag, s11 * z.real
        y = _reals(2 * rows, 2 * cols)
        yield _case(
            "expand_complex", grid, threads, [rows, cols, *x.arguments(0)[:2], s01, s10, s11,
                                              y.arguments(1)[0]],
            [x, y], squares.reshape(1, 2 * rows, 2 * cols), 1, seed, str(places),
        )  # fmt: skip
        halves = np.stack([z.real, s01 * z.imag], axis=1)
        y = _reals(2 * rows, cols)
        yield _case(
            "split_complex", grid, threads, [rows, cols, *x.arguments(0)[:2], s01,
                                             y.arguments(1)[0]],
            [x, y], halves.reshape(1, 2 * rows, cols), 1, seed, str(places),
        )  # fmt: skip
        for added, alpha in ((True, 1.0), (False, -0.3)):
            parts, d = _reals(2 * rows, cols, rng), _pairs(places, 2)
            t = parts.view[0].reshape(rows, 2, cols)
            sums = t[:, 0] + 1j * (np.float32(s01) * t[:, 1])
            sums = _times(alpha, sums + z if added else sums)
            p = x.arguments(1)[:2] if added else (None, 0)
            yield _case(
                "join_complex", grid, threads,
                [rows, cols, parts.arguments(0)[0], s01, alpha, *p, *d.arguments(2)[:2]],
                [parts, x, d], sums.view("u8")[None], 2, seed, f"{places} {alpha}",
            )  # fmt: skip


def mirror_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Hermitian and symmetric matrices, with and without what is added."""
    tile, rng = defines["TILE"], np.random.default_rng(12)
    for seed, (n, sign, added) in enumerate((
        (1, -1.0, False), (tile, 1.0, True), (tile + 1, -1.0, True), (3 * tile - 5, -1.0, False),
        (4 * tile + 3, 1.0, True), (2 * tile, -1.0, True),
    )):  # fmt: skip
        places = Places(n, n, extra=(seed % 3,), offset=(seed % 2,))
        re, s, alpha = _reals(n, n, rng), _reals(n, n, rng), (1.0, -0.3)[seed % 2]
        below = np.tri(n, dtype=bool)
        re.view[0][~below] = np.nan  # above the diagonal nothing is asked for
        h = re.view[0] + 1j * (s.view[0] + np.float32(sign) * s.view[0].T)
        p, d = _pairs(places, 0, rng), _pairs(places, 1)
        if added:
            h = h + _complex(p)
        lower = _times(alpha, h.astype("c8"))
        upper = lower.T.copy()
        upper.imag *= np.float32(sign)
        whole = np.where(below, lower, upper)
        tiles = -(-n // tile)
        at = p.arguments(2)[:2] if added else (None, 0)
        yield _case(
            "mirror_complex", (-(-tiles // 2) * (tiles + 1), 1, 1), defines["THREADS"],
            [n, re.arguments(0)[0], s.arguments(1)[0], sign, alpha, *at, *d.arguments(3)[:2]],
            [re, s, p, d], np.ascontiguousarray(whole).view("u8")[None], 3, seed, f"n = {n} {sign}",
        )  # fmt: skip


def _case(entry: str, grid: tuple[int, int, int], threads: int, arguments: list[object],
          matrices: list[Matrix], result: np.ndarray, at: int, seed: int,
          what: str) -> Case:  # fmt: skip
    buffers = [matrix.buffer for matrix in matrices]
    launch = Launch(entry, grid, threads, arguments, buffers, seed=seed, what=f"{entry} {what}")
    expected = list(buffers)
    expected[at] = matrices[at].holding(result).buffer
    return Case(launch, expected)
