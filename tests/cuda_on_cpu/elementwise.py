"""Cases for the kernels that move or add elements: transpose, add_partials, copy_pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuda_on_cpu.operands import Far, Operand, placed
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Launch, Struct
from multimm.gpu.library_gemm import add_partials


@dataclass(frozen=True)
class Places:
    """Where matrices of one shape lie: one tuple per property, by operand, read cyclically."""

    rows: int
    cols: int
    batch: int = 1
    extra: tuple[int, ...] = (0,)
    offset: tuple[int, ...] = (0,)
    gap: int = 0
    repeat: bool = False  #: one input for the whole batch
    far: bool = False

    def aligned(self, vector: int) -> Places:
        """The same with leading dimensions and first elements at multiples of `vector`."""
        up = lambda values: tuple(-(-value // vector) * vector for value in values)  # noqa: E731
        return replace(self, extra=up(self.extra), offset=up(self.offset), gap=self.gap * vector)

    def operand(self, index: int, dtype: str, *, vector: int, turned: bool = False,
                repeat: bool = False) -> Operand | Far:  # fmt: skip
        """An empty operand."""
        rows, cols = (self.cols, self.rows) if turned else (self.rows, self.cols)
        if self.far:
            return Far(np.zeros((rows, cols), dtype), 2**31 + 4)
        extra = self.extra[index % len(self.extra)]
        return placed(
            (self.batch, rows, cols), dtype, extra=extra + -(cols + extra) % vector,
            offset=self.offset[index % len(self.offset)], gap=self.gap, repeat=repeat,
        )  # fmt: skip


def _places(tile_rows: int, tile_cols: int) -> list[Places]:
    return [
        Places(1, 1),
        Places(tile_rows, tile_cols),
        Places(2 * tile_rows, 3 * tile_cols, extra=(4, 8), offset=(4, 0)),
        Places(tile_rows + 1, tile_cols - 1, extra=(1, 3, 0), offset=(1, 0, 3)),
        Places(tile_rows - 1, 2 * tile_cols + 3, extra=(3, 1), offset=(0, 1), batch=2, gap=3),
        Places(3, tile_cols + 2, extra=(5, 2), offset=(3, 2), batch=3, repeat=True),
        Places(2 * tile_rows + 5, 2 * tile_cols - 3, extra=(2, 1), offset=(2, 3)),
        Places(2 * tile_rows, 2 * tile_cols, extra=(1, 3), offset=(1, 2)),
        Places(4 * tile_rows + 1, 2 * tile_cols + 1, extra=(3, 0)),  # more than one band
        Places(3, 2, far=True),
    ]


def transpose_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """B = transpose(A), bit by bit; with SKEW, by the kernel whose rows begin anywhere."""
    skew, vector, slots = (defines.get(*x) for x in (("SKEW", 0), ("VECTOR", 1), ("SLOTS", 32)))
    entry, alignment = ("transpose_skewed", 1) if skew else ("transpose", vector)
    tile = vector * slots
    down = tile - skew  # rows of A from one tile to the next
    size = defines["WORD_BYTES"] * defines["WORDS"]
    dtype = f"u{size}" if size in (1, 2, 4, 8) else f"V{size}"
    rng = np.random.default_rng(3)
    for seed, places in enumerate(x.aligned(alignment) for x in _places(down, tile)):
        a = places.operand(0, dtype, vector=alignment, repeat=places.repeat)
        rows, cols = places.rows, places.cols
        shape = (1 if places.repeat else places.batch, rows, cols)
        a = a.holding(np.frombuffer(rng.bytes(size * int(np.prod(shape))), dtype).reshape(shape))
        b = places.operand(1, dtype, vector=alignment, turned=True)
        tile_rows = -(-(rows + max(skew - 1, 0)) // down)
        launch = Launch(
            entry, (tile_rows * -(-cols // tile), 1, places.batch), defines.get("THREADS", 256),
            [rows, cols, *a.arguments(0), *b.arguments(1)], [a.buffer, b.buffer], seed=seed,
            what=f"{entry} {places}",
        )  # fmt: skip
        yield Case(launch, [a.buffer, b.holding(a.view.swapaxes(1, 2)).buffer])


def add_cases(defines: Mapping[str, int], count: int) -> Iterator[Case]:
    """D = alpha * sum of the parts + beta * C, to the last bit."""
    dtype = "f4"
    vector = defines["VECTOR"]
    span = defines["THREADS"] * vector * defines["UNROLL"]
    rng = np.random.default_rng(5)
    alphas, betas = (1, 0.75, 0, 0, -1.5, 1, 0.3, 1, 1, 2), (0, -0.3, 2, 0, 0, 1, 0.7, 1, 0, 1)
    for seed, places in enumerate(x.aligned(vector) for x in _places(3, span)):
        alpha, beta = float(alphas[seed]), float(betas[seed])
        operands = [places.operand(i, dtype, vector=vector, repeat=places.repeat and i < count)
                    for i in range(count + 2)]  # fmt: skip
        for i in range(count + 1):
            if (beta if i == count else alpha) != 0:  # what is not read stays NaN
                shape = (1 if operands[i].view.strides[0] == 0 else places.batch,
                         *operands[i].view.shape[1:])  # fmt: skip
                operands[i] = operands[i].holding(rng.standard_normal(shape).astype(dtype))
        yield _add_case(operands, (alpha, beta), places, span, defines, seed)


def _add_case(operands: list[Operand | Far], scalars: tuple[float, float], places: Places,
              span: int, defines: Mapping[str, int], seed: int) -> Case:  # fmt: skip
    *parts, c, d = operands
    alpha, beta = (np.dtype(d.view.dtype).type(scalar) for scalar in scalars)
    result = np.zeros_like(d.view) if alpha == 0 else alpha * add_partials([x.view for x in parts])
    result = result + beta * c.view if beta != 0 else result
    # In place where it is allowed: D is the first part, or C.
    at = {1: 0, 3: len(parts)}.get(seed, len(parts) + 1)
    matrices = [x.arguments(i) for i, x in enumerate(operands)]
    missing = [(None, 0, 0)] * (defines["CAPACITY"] - len(parts))
    table = [*matrices[: len(parts)], *missing]
    launch = Launch(
        "add_partials", (places.rows * -(-places.cols // span), 1, places.batch),
        defines["THREADS"],
        [places.cols, *scalars, len(parts), Struct(tuple(v for x in table for v in x)),
         Struct(matrices[-2] if beta != 0 else (None, 0, 0)), Struct(matrices[at])],
        [x.buffer for x in operands], seed=seed, what=f"add_partials {scalars} {places}",
    )  # fmt: skip
    expected = list(launch.buffers)
    expected[at] = operands[at].holding(result).buffer
    return Case(launch, expected)


def copy_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Rectangles of bytes: as many as fit, one, narrow and wide, upside down, far apart."""
    span = defines["THREADS"] * defines["UNROLL"]
    rng = np.random.default_rng(7)
    shapes = [(1, 1), (3, 2), (2, span), (1, 2 * span + 1), (5, defines["THREADS"]), (7, 3),
              (span + 1, 1), (2, defines["THREADS"] - 1), (3, defines["THREADS"] + 1)]  # fmt: skip
    for seed, count in enumerate((defines["CAPACITY"], 1, max(1, defines["CAPACITY"] - 1))):
        pieces = []
        for i in range(count):
            size = (1, 2, 4, 8, 16)[(i + seed) % 5]
            rows, cols = shapes[(i + 4 * seed) % len(shapes)]
            dtype = f"u{size}" if size < 16 else "V16"
            places = Places(rows, cols, extra=(i % 3, (i + seed) % 2), offset=(i % 2, i % 4))
            source = places.operand(0, dtype, vector=1)
            values = np.frombuffer(rng.bytes(rows * cols * size), dtype).reshape(1, rows, cols)
            pieces.append((source.holding(values), places.operand(1, dtype, vector=1), i % 4 == 3))
        yield _copy_case(pieces, span, defines, seed)
    far = replace(Places(3, 2), far=True)
    source = far.operand(0, "u4", vector=1).holding(rng.integers(0, 9, (1, 3, 2)))
    yield _copy_case([(source, far.operand(1, "u4", vector=1), False)], span, defines, 3)


def _copy_case(pieces: Sequence[tuple[Operand | Far, Operand | Far, bool]], span: int,
               defines: Mapping[str, int], seed: int) -> Case:  # fmt: skip
    """Copies of sources, the last row first for those that are to be turned."""
    table: list[object] = []
    blocks, buffers, expected = 0, [], []
    for i, (source, target, turned) in enumerate(pieces):
        (_, rows, cols), size = source.view.shape, source.view.itemsize
        (at, ld, _), (to, target_ld, _) = source.arguments(2 * i), target.arguments(2 * i + 1)
        pitch = -ld if turned else ld
        if turned:
            at = replace(at, offset=at.offset + (rows - 1) * ld * size)
        table += [at, to, pitch * size, target_ld * size, cols, rows * cols, size, blocks]
        blocks += -(-rows * cols // span)
        buffers += [source.buffer, target.buffer]
        found = source.view[:, ::-1] if turned else source.view
        expected += [source.buffer, target.holding(found).buffer]
    missing = [None, None, *[0] * 6] * (defines["CAPACITY"] - len(pieces))
    launch = Launch(
        "copy_pieces", (blocks, 1, 1), defines["THREADS"],
        [len(pieces), Struct((*table, *missing))], buffers, seed=seed,
        what=f"{len(pieces)} pieces",
    )  # fmt: skip
    return Case(launch, expected)
