"""Every kernel under compute-sanitizer, over small shapes: memory, races, barriers.

As a program it runs the kernels and checks their results, which is what the sanitizer watches:

    compute-sanitizer --tool racecheck python tests/gpu/test_sanitizer.py

A product that reaches another kernel is one more line in PRODUCTS, a kernel that computes something
else one more function in KERNELS.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from multimm.gpu import library_gemm
from multimm.gpu.elementwise import complex_parts
from multimm.gpu.elementwise.batched_copy import Move, copy_all
from multimm.gpu.elementwise.reduce import add_partials
from multimm.gpu.elementwise.transpose import transpose
from multimm.gpu.emulated import configs, pack
from multimm.gpu.emulated.configs import BROAD_PRODUCTS, PARTS, SPLIT_REGISTRY, entries_for
from multimm.gpu.emulated.gemm import prepared
from multimm.gpu.integers import tensor_cores
from multimm.gpu.kernel_selection import SPLIT, Choice, last_choice
from multimm.gpu.problem import check_product
from multimm.gpu.product import gemm
from multimm.gpu.residues.formats import FORMATS
from multimm.gpu.residues.gemm import gemm as by_residues
from multimm.gpu.runtime.jit import compile_text, target_for
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.simt.configs import REGISTRY

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

SANITIZER = "compute-sanitizer"
U = 2.0**-24


@dataclass(frozen=True)
class Product:
    """Sizes of a product, or of a stack of `batch` of them."""

    m: int
    n: int
    k: int
    batch: int = 0
    extra: int = 0  #: by how much leading dimensions exceed the width
    config: str | None = None
    transposes: tuple[str, ...] = ("NN", "NT", "TN", "TT")


PRODUCTS = (
    Product(1, 1, 1),
    Product(70, 67, 45),  # ragged
    Product(64, 128, 48),  # 16 bytes at a time
    Product(65, 72, 33, extra=3),
    Product(40, 36, 20, extra=4),
    Product(20, 12, 9, batch=3),
    Product(33, 20, 2500),  # slices of k, which add_partials adds
    # A short side, and a thin k.
    Product(300, 1, 700),
    Product(1, 300, 700),
    Product(7, 140, 1100, extra=1),
    Product(140, 8, 520, batch=3),
    Product(520, 600, 5),
    # Not each in all four: most of the time is the compiler's.
    *(
        Product(132, 260, 70, config=entry.name, transposes=(way,))
        for entry, way in zip(REGISTRY, itertools.cycle(("NN", "TT", "NT", "TN")), strict=False)
    ),
)

#: Each does on purpose what one of the tools finds, with two warps and 64 floats.
WRONG = """
extern "C" __global__ void memcheck(float* x) { x[threadIdx.x + 1] = 0.0f; }
extern "C" __global__ void initcheck(float* x) { x[threadIdx.x] += 1.0f; }
extern "C" __global__ void synccheck(float* x) {
  if (threadIdx.x < 40) __syncthreads();
  x[threadIdx.x] = 0.0f;
}
extern "C" __global__ void racecheck(float* x) {
  __shared__ float tile[64];
  tile[threadIdx.x] = static_cast<float>(threadIdx.x);
  x[threadIdx.x] = tile[63 - threadIdx.x];
}
"""
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def uploaded(values: np.ndarray, extra: int = 0):
    """The values in GPU memory that ends with the last of them, `extra` elements behind each row.

    Copied as a whole, so that no kernel but ours runs.
    """
    *outer, width = values.shape
    fill = np.nan if values.dtype.kind in "fc" else 77
    whole = np.full((*outer, width + extra), fill, values.dtype)
    whole[..., :width] = values
    memory = cupy.asarray(whole.reshape(-1)[: whole.size - extra])
    return cupy.ndarray(values.shape, values.dtype, memptr=memory.data, strides=whole.strides)


def downloaded(x) -> np.ndarray:
    """The values of such an array."""
    span = sum((size - 1) * step for size, step in zip(x.shape, x.strides, strict=True))
    flat = cupy.asnumpy(cupy.ndarray(span // x.itemsize + 1, x.dtype, memptr=x.data))
    return np.lib.stride_tricks.as_strided(flat, x.shape, x.strides)


def run_product(p: Product, trans_a: bool, trans_b: bool) -> None:
    """Multiply plainly, then with all operands in slices; compare with float64."""
    rng, stack = np.random.default_rng(1), (p.batch,) if p.batch else ()
    shapes = ((p.k, p.m) if trans_a else (p.m, p.k), (p.n, p.k) if trans_b else (p.k, p.n))
    a, b, c, partial = (
        rng.standard_normal((*stack, *shape)).astype(np.float32)
        for shape in (*shapes, (p.m, p.n), (p.m, p.n))
    )
    left, right = (
        np.swapaxes(x, -1, -2) if turned else x for x, turned in ((a, trans_a), (b, trans_b))
    )
    exact, scale = left.astype(float) @ right, abs(left).astype(float) @ abs(right)
    ga, gb, gc, gp = (uploaded(x, p.extra) for x in (a, b, c, partial))
    flags = {"trans_a": trans_a, "trans_b": trans_b, "config": p.config, "precision": "ieee"}
    unread = cupy.empty_like(gc)  # initcheck would say if it were
    plain = gemm(ga, gb, beta=0, c=unread, **flags)
    out = uploaded(np.full_like(c, np.nan), p.extra)
    gemm(ga, gb, alpha=0.5, beta=-1, c=gc, partial=gp, out=out, **flags)
    for result, expected, added in (
        (plain, exact, 0), (out, 0.5 * (exact + partial) - c, abs(partial) + abs(c)),
    ):  # fmt: skip
        error = abs(downloaded(result) - expected)
        assert (error <= (p.k + 6) * U * (scale + added)).all(), f"{p}, {flags}"


def products() -> None:
    """Run sgemm_ffma and whatever else `gemm` chooses."""
    for product in PRODUCTS:
        for way in product.transposes:
            run_product(product, way[0] == "T", way[1] == "T")


def sums() -> None:
    """Run add_partials."""
    rng = np.random.default_rng(2)
    for count, (shape, extra) in itertools.product(
        (1, 3, 9), (((5, 256), 0), ((3, 1025), 0), ((7, 33), 3), ((2, 3, 70), 2))
    ):
        values = [rng.standard_normal(shape).astype("f4") for _ in range(count + 1)]
        *parts, c = (uploaded(x, extra) for x in values)
        for alpha, beta in ((1, 0), (0.5, 2)):
            out = add_partials(parts, alpha=alpha, beta=beta, c=c)
            expected = library_gemm.add_partials(values[:-1], alpha=alpha, beta=beta, c=values[-1])
            assert (downloaded(out) == expected).all(), f"{count} {shape} {alpha} {beta}"


def transposes() -> None:
    """Run transpose and transpose_skewed."""
    for dtype, (shape, extra) in itertools.product(
        ("u1", "f2", "f4", "f8", "c16"),
        (((1, 1), 0), ((33, 70), 0), ((64, 128), 0), ((65, 31), 3), ((2, 40, 50), 1),
         ((2053, 67), 0)),
    ):  # fmt: skip
        values = np.random.default_rng(3).integers(0, 99, shape).astype(dtype)
        result = transpose(uploaded(values, extra))
        assert (downloaded(result) == np.swapaxes(values, -1, -2)).all(), f"{dtype} {shape}"


def copies() -> None:
    """Run copy_pieces, on words of every length."""
    rng = np.random.default_rng(7)
    for dtype, (rows, cols), extra in itertools.product(
        ("u1", "f2", "f4", "f8", "c16"), ((1, 1), (7, 33), (5, 256), (2, 3000)), (0, 3)
    ):
        values = rng.integers(0, 99, (rows, cols)).astype(dtype)
        source, target = uploaded(values, extra), uploaded(np.zeros((2 * rows, cols), dtype), extra)
        whole, columns = (slice(0, rows), slice(0, cols)), slice(0, cols)
        places = [(slice(i * rows, (i + 1) * rows), columns) for i in range(2)]
        copy_all([Move(source, whole, target, place) for place in places])
        assert (downloaded(target) == np.vstack([values, values])).all(), f"{dtype} {rows} {cols}"


def packed() -> None:
    """Run split_pack, split_unpack, and all products of packed operands that the GPU can."""
    rng, limits = np.random.default_rng(4), device_of(0).limits
    # The last one is not cut into slices: sums of tf32 are put aside on their way.
    sizes = (1, 1, 1), (130, 200, 300), (64, 70, 2000), (1100, 600, 3200)
    for scheme, (m, n, k), extra in itertools.product(("float32", "tf32"), sizes, (0, 3)):
        a, b, c = (
            rng.integers(-8, 9, shape).astype(np.float32) for shape in ((m, k), (n, k), (m, n))
        )
        if k > 1:
            a[0, -1] = 2.0**-40  # too small for its row: a residual, which is added elsewhere
        left = pack.pack(uploaded(a, extra), side="a", scheme=scheme)
        right = pack.pack(uploaded(b, extra), side="b", trans=True, scheme=scheme)
        assert (downloaded(left.unpack()) == a).all(), f"{scheme} {m}x{k}"
        assert (downloaded(right.unpack()) == b.T).all(), f"{scheme} {n}x{k}"
        for config in (entry.config for entry in SPLIT_REGISTRY if entry.config.runs_on(limits)):
            if config.parts != PARTS[scheme]:
                continue
            gc, gp = uploaded(c, extra), uploaded(c, extra)
            result = gemm(left, right, alpha=0.5, beta=-1, c=gc, partial=gp, config=config)
            expected = 0.5 * (a.astype(float) @ b.T + c) - c
            assert abs(downloaded(result) - expected).max() < 2.0**-20, f"{scheme} {m}x{n}x{k}"


def guarded() -> None:
    """Run what a product on the tensor cores launches: for all data, odd elements, and refused."""
    if not entries_for(device_of(0).limits):
        return
    rng = np.random.default_rng(5)
    for (m, n, k), odd in itertools.product(
        ((130, 70, 300), (40, 60, 5000)), (None, 2.0**-40, np.nan)
    ):
        a, b = (rng.integers(1, 9, shape).astype(np.float32) for shape in ((m, k), (k, n)))
        if odd is not None:
            a[3, 5] = odd
        x, out = uploaded(a, 1), uploaded(np.zeros((m, n), "f4"), 1)
        choice, none = Choice(SPLIT, "float32", "asked for"), (None, None)
        problem = check_product(
            x, uploaded(b, 3), *none, out, (False, False), 1.0, 0.0, lower=False
        ).addressable()
        prepared(problem, choice)(problem.pointers)
        exact = a.astype(float) @ b
        result = downloaded(out)
        assert np.allclose(result, exact, rtol=2.0**-20, equal_nan=True), f"{m}x{n}x{k} {odd}"
        assert last_choice().kernel == ("sgemm_ffma" if odd != odd else "sgemm_split")
        symmetric = uploaded(np.full((m, m), 77, "f4"), 1)
        problem = check_product(
            x, x, *none, symmetric, (False, True), 1.0, 0.0, lower=True
        ).addressable()
        assert problem.symmetric
        prepared(problem, choice)(problem.pointers)
        exact, result = np.tril(a.astype(float) @ a.T), np.tril(downloaded(symmetric))
        assert np.allclose(result, exact, rtol=2.0**-20, equal_nan=True), f"{m}x{m}x{k} {odd}"


def wide_ranges() -> None:
    """Run broad_pack and the products of what it makes: whole, in slices, of every kind of line."""
    if not entries_for(device_of(0).limits, BROAD_PRODUCTS["float32"]):
        return
    rng = np.random.default_rng(9)
    for precision, (m, n, k), extra, turned in itertools.product(
        BROAD_PRODUCTS, ((130, 70, 300), (40, 60, 5000)), (0, 3), (False, True)
    ):
        a, b = (rng.integers(1, 9, shape).astype(np.float32) for shape in ((m, k), (k, n)))
        scales = np.where(np.arange(k) % 2, 2.0**40, 1).astype("f4")
        x, y = a * scales, b / scales[:, None]
        lost = turned and precision == "tf32"
        if lost:
            x[3, 1::2] = 2.0**125  # beside 1: no parts carry that
            y[1::2] = 0
        given = [uploaded(v.T if turned else v, extra) for v in (x, y)]
        out = uploaded(np.zeros((m, n), "f4"), 1)
        problem = check_product(
            *given, None, None, out, (turned, turned), 1.0, 0.0, lower=False
        ).addressable()
        prepared(problem, Choice(SPLIT, precision, "asked for"))(problem.pointers)
        exact = x.astype(float) @ y
        assert np.allclose(downloaded(out), exact, rtol=2.0**-20), f"{precision} {m}x{n}x{k}"
        assert last_choice().kernel == ("sgemm_ffma" if lost else "sgemm_split")
        assert "do not carry" in last_choice().reason


def triangles() -> None:
    """Run products whose tiles above the diagonal are left out."""
    rng, wgmma = np.random.default_rng(6), cupy.cuda.Device().compute_capability == "90"
    for size, extra in ((1, 0), (300, 3), (700, 0)):  # k is too short for slices
        a, b = (rng.integers(-8, 9, (size, 40)).astype(np.float32) for _ in "ab")
        ga, gb = uploaded(a, extra), uploaded(b, extra)
        made = [uploaded(np.full((size, size), 77, np.float32), extra) for _ in range(3)]
        gemm(ga, gb, precision="ieee", trans_b=True, out=made[0], lower=True)
        for scheme, out in zip(("float32", "tf32") if wgmma else (), made[1:], strict=False):
            left = pack.pack(ga, side="a", scheme=scheme)
            right = pack.pack(gb, side="b", trans=True, scheme=scheme)
            gemm(left, right, out=out, lower=True)
        for out in made if wgmma else made[:1]:
            found = downloaded(out)
            assert (np.tril(found) == np.tril(a @ b.T)).all(), size
            assert size < 300 or found[0, -1] == 77


def complexes() -> None:
    """Run complex_parts and complex_mirror."""
    rng = np.random.default_rng(8)
    for (rows, cols), extra in itertools.product(((1, 1), (33, 70), (5, 1500)), (0, 3)):
        x = (rng.integers(-9, 9, (rows, cols)) + 1j * rng.integers(-9, 9, (rows, cols))).astype(
            "c8"
        )
        source, target = uploaded(x, extra), uploaded(np.zeros_like(x), extra)
        halves = cupy.empty((rows, 2, cols), np.float32)
        complex_parts.split(source, halves, -1.0)
        complex_parts.join(halves, target, sign=-1.0, alpha=2.0, partial=source)
        assert (downloaded(target) == 4 * x).all(), f"{rows}x{cols}"
        squares = cupy.empty((2 * rows, 2 * cols), np.float32)
        complex_parts.expand(source, squares, complex_parts.signs(False, False, False))
        whole = downloaded(squares).reshape(rows, 2, cols, 2)
        assert (whole[:, 0] == x.view("f4").reshape(rows, cols, 2)).all()
        assert (whole[:, 1, :, 0] == -x.imag).all()
    for n, sign in itertools.product((1, 32, 77), (-1.0, 1.0)):
        re, s = (rng.integers(-9, 9, (n, n)).astype("f4") for _ in "rs")
        made = uploaded(np.zeros((n, n), "c8"), 1)
        halves = cupy.asarray(re), cupy.asarray(s)
        complex_parts.mirror(*halves, made, sign=sign, alpha=1.0, partial=None)
        lower = np.tril(re) + 1j * np.tril(s + sign * s.T)
        upper = np.tril(lower, -1).T
        assert (downloaded(made) == lower + (upper.conj() if sign < 0 else upper)).all(), n


def integers() -> None:
    """Run integer_pack and products of integers: ragged, in slices of k, of every slab alone."""
    if not entries_for(device_of(0).limits):
        return
    rng = np.random.default_rng(7)
    for (m, n, k), extra in itertools.product(((1, 1, 1), (130, 200, 300), (64, 70, 2000)), (0, 3)):
        for dtype, sums in (("i1", "i4"), ("u1", "i8"), ("i2", "f8")):
            a, b = (rng.integers(0, 128, shape).astype(dtype) for shape in ((m, k), (n, k)))
            given = uploaded(a, extra), uploaded(b, extra)
            exact = a.astype("i8") @ b.T.astype("i8")
            p = uploaded(np.ones((m, n), sums), extra)
            made = tensor_cores.product(*given, (False, True), (m, n), np.dtype(sums), partial=p)
            assert (downloaded(made) == exact + 1).all(), f"{dtype} {m}x{n}x{k}"
    x = rng.integers(-128, 128, (300, 90)).astype("i1")
    made = tensor_cores.product(
        given := uploaded(x, 1), given, (False, True), (300, 300), np.dtype("i4"), lower=True
    )
    exact = x.astype("i8") @ x.T.astype("i8")
    for i in range(300):  # what lies above the diagonal is nobody's: initcheck would say so
        assert (downloaded(made[i, : i + 1]) == exact[i, : i + 1]).all(), i


def residues() -> None:
    """Run residue_rows, residue_pack, byte_mma and residue_join: of integers and others."""
    if device_of(0).limits.capability != 90:
        return
    rng = np.random.default_rng(10)
    sizes = ((1, 1, 1), (130, 70, 300), (40, 600, 129))
    both = (False, True)
    for (m, n, k), extra, trans, rounded in itertools.product(sizes, (0, 3), both, both):
        for dtype, of in FORMATS.items():
            if dtype != "float64" and (extra == 3) != trans:
                continue
            a, b, c = (
                rng.integers(-8, 9, (*size, of.system.parts)).astype(float)
                for size in ((m, k), (k, n), (m, n))
            )
            if rounded:
                a, b = (z + rng.random(z.shape) for z in (a, b))
            a, b, c = (
                (z[..., 0] + 1j * z[..., 1] if of.system.roots else z[..., 0]).astype(dtype)
                for z in (a, b, c)
            )
            given = [uploaded(z.T if trans else z, extra) for z in (a, b)]
            gc = uploaded(c, extra)
            made = by_residues(
                *given, (m, n), trans=(trans, trans), alpha=0.5, beta=-1.0, c=gc, partial=gc
            )
            if made is None:  # the parts of a single number may differ by any factor
                assert k == 1, f"{m}x{n}x{k} {dtype} {rounded=}"
                continue
            error = abs(downloaded(made) - (0.5 * (a @ b + c) - c))
            bound = (4 * k + 8) * of.unit * (abs(a) @ abs(b) + 2 * abs(c))
            assert (error <= bound).all(), f"{m}x{n}x{k} {dtype} {rounded=}"


KERNELS: tuple[Callable[[], None], ...] = (
    products, sums, transposes, copies, packed, guarded, wide_ranges, triangles, complexes,
    integers, residues,
)  # fmt: skip


def go_wrong(tool: str) -> None:
    """Run what a tool has to find."""
    binary = compile_text(WRONG, target_for(int(cupy.cuda.Device().compute_capability))).binary
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "wrong.cubin")
        path.write_bytes(binary)
        kernel = cupy.RawModule(path=str(path)).get_function(tool)
        kernel((1,), (64,), (cupy.empty(64, np.float32),))
        cupy.cuda.Device().synchronize()


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this file under a tool."""
    sanitizer = shutil.which(SANITIZER)
    if sanitizer is None:
        pytest.skip(f"{SANITIZER}, a part of the CUDA toolkit, is not on the path")
    words = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    done = subprocess.run([*words, sys.executable, __file__, *arguments],
                          capture_output=True, text=True)  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip(f"{SANITIZER} does not support this GPU or the machine that it is lent to")
    return done


@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_are_clean(tool):
    done = sanitized(tool)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert (
        "checked: products, sums, transposes, copies, packed, guarded, wide_ranges, triangles, "
        "complexes, integers, residues" in done.stdout
    )
    found = re.findall(r"(\d+) (?:errors?|warnings?)\b", done.stdout)
    assert found, done.stdout
    assert set(found) == {"0"}, done.stdout[-6000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tool_finds_what_it_is_for(tool):
    done = sanitized(tool, tool)
    assert done.returncode != 0, done.stdout[-3000:]
    assert f"at {tool}+0x" in done.stdout, done.stdout[-3000:]


if __name__ == "__main__":
    cupy.cuda.set_allocator(None)  # memory of a pool would hide who reads beyond its own
    if wrong := sys.argv[1:]:
        go_wrong(wrong[0])
    else:
        pack.SPLIT_K = 0  # small operands are packed too, instead of keeping their source
        configs.BROAD_SECONDS = 0  # and made ready for data of a wide range
        for run in KERNELS:
            run()
        print("checked:", ", ".join(run.__name__ for run in KERNELS))
