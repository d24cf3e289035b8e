"""Products of arrays on the tensor cores, with NumPy for the kernels: what is launched, and why."""

from __future__ import annotations

import ctypes
import sys
import weakref

import numpy as np
import pytest
import stand_in
from pack_reference import broad_parts, broad_tiles
from stand_in import fake_cupy, gpu, laid_out, memory
from test_pack import Kernel as PackKernel

from multimm.gpu import precompile
from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated import configs
from multimm.gpu.emulated import gemm as emulated_gemm
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, last_choice
from multimm.gpu.problem import check_product
from multimm.gpu.runtime import launch as runtime_launch

CHOICE = Choice(SPLIT, "float32", "large")


class OutOfMemoryError(MemoryError):
    """As CuPy's; RMM raises its parent."""


class Kernels:
    """Launches by name; each computes what its kernel does, D as float64 sums."""

    def __init__(self):
        self.ran = []
        self.packed = []  # rows of each operand
        self.allocated, self.room = [], 10**9
        self.broad = {}
        self.arrays = []
        self.defines = {}

    def load(self, text, entry, *_):
        kernel = stand_in.Kernel(text, entry)
        self.defines[entry] = kernel.defines
        return lambda grid, block, args, shared_mem=0: self.run(kernel, grid, args, shared_mem)

    def run(self, kernel, grid, args, shared_mem):
        entry = kernel.name
        self.ran.append(entry)
        if entry == "split_pack":
            members = np.frombuffer(args[0].tobytes(), "u8").reshape(2, 14)
            self.packed += [int(rows) for rows in members[:, 2] if rows]
            PackKernel(entry, tuple(kernel.defines.items()))(grid, (256, 1, 1), args, shared_mem)
            return
        if kernel.defines.get("BROAD"):
            entry, self.ran[-1] = "sgemm_broad", "sgemm_broad"
        counts = memory(args[-1], (6,), (1,), "u8").tolist()
        refused = bool(counts[0] or counts[2] or max(counts[1], counts[3]) > RESIDUAL_CAP)
        broad = refused and not counts[0] and not counts[2]
        ways = {"broad_pack": broad, "sgemm_broad": broad and counts[4:] == [1, 0],
                "sgemm_ffma": refused and not (broad and counts[4:] == [1, 0])}  # fmt: skip
        computes = getattr(self, entry)
        if ways.get(entry, not refused):
            self.ran[-1] += " !"
            computes(*args)

    def broad_pack(self, operands, counts):
        members, counts = np.frombuffer(operands.tobytes(), "u8"), memory(counts, (6,), (1,), "u8")
        for x, ld, rows, k, along_k, _, tiles, exponents in members.reshape(2, 8).tolist():
            if not x:
                continue
            given = memory(x, (rows, k) if along_k else (k, rows), (ld, 1), "f4")
            given, e = (given if along_k else given.T), memory(exponents, (rows,), (1,), "i4")
            made = broad_tiles(given, e, self.defines["broad_pack"]["PARTS"])
            assert made.nbytes <= exponents - tiles, "exponents lie behind tiles"
            memory(tiles, made.shape, tuple(s // 2 for s in made.strides), "u2")[...] = made
            self.broad[tiles] = given.copy()
            counts[5] += bool((broad_parts(given, 3, e)[0].sum(axis=0) == 0)[given != 0].any())
        counts[4] = 1

    def sgemm_broad(self, m, n, slabs, step, alpha, beta, a, ea, b, eb, c, ldc, p, ldp, d, ldd,
                    apart, counts):  # fmt: skip
        x, y = self.broad[a], self.broad[b]  # of what lies there now
        assert step == 0
        assert slabs == -(-x.shape[1] // 64) * {3: 1, 1: 2}[self.defines["broad_pack"]["PARTS"]]
        self.finish(x.astype("f8") @ y.T.astype("f8"), alpha, beta, (c, ldc), (p, ldp), (d, ldd))

    def sgemm_split(self, m, n, slabs, step, alpha, beta, a, ea, b, eb, c, ldc, p, ldp, d, ldd,
                    apart, counts):  # fmt: skip
        assert step == 0
        unpack = PackKernel("unpack", (("PARTS", 2),)).carried
        x, y = unpack(m, self.k, a, ea), unpack(n, self.k, b, eb)
        self.finish(x.astype("f8") @ y.T.astype("f8"), alpha, beta, (c, ldc), (p, ldp), (d, ldd))

    def split_residuals(self, m, n, k, alpha, *rest):
        self.lists = [rest[i + 3 : i + 5] for i in (0, 5)]
        self.counted = memory(rest[-1], (4,), (1,), "u8").tolist()

    def sgemm_ffma(self, m, n, k, k_step, alpha, beta, *operands):
        (a, lda, _), (b, ldb, _), (c, ldc, _), (p, ldp, _), (d, ldd, _) = (
            operands[i : i + 3] for i in range(0, 15, 3)
        )
        defines = self.defines["sgemm_ffma"]
        assert defines["GUARDED"] == RESIDUAL_CAP
        shapes = (
            (k, m) if defines["TRANS_A"] else (m, k),
            (n, k) if defines["TRANS_B"] else (k, n),
        )
        x, y = (memory(at, shape, (ld, 1), "f4").astype("f8")
                for at, shape, ld in zip((a, b), shapes, (lda, ldb), strict=True))  # fmt: skip
        x, y = (x.T if defines["TRANS_A"] else x), (y.T if defines["TRANS_B"] else y)
        self.finish(x @ y, alpha, beta, (c, ldc), (p, ldp), (d, ldd))

    def finish(self, sums, alpha, beta, c, p, d):
        def matrix(at, ld):
            return memory(at, sums.shape, (ld, 1), "f4")

        sums = alpha * (sums + (matrix(*p) if p[0] else 0))
        matrix(*d)[...] = sums + (beta * matrix(*c) if c[0] and beta else 0)

    def empty(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > self.room:
            raise OutOfMemoryError
        self.allocated.append(size)
        array = gpu(np.full(shape, 0x55, dtype)).reshape(shape)
        self.arrays.append(weakref.ref(array))
        return array


class Stream:
    """The current one."""

    ptr = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    module = fake_cupy()
    module.empty = found.empty
    module.cuda.get_current_stream = Stream
    module.cuda.runtime.streamIsCapturing = lambda stream: False
    module.cuda.runtime.memsetAsync = lambda at, value, size, _: ctypes.memset(at, value, size)
    module.cuda.runtime.memcpyAsync = lambda to, at, size, *_: ctypes.memmove(to, at, size)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(stand_in.GPUArray, "get", lambda x, stream: np.array(x), raising=False)
    monkeypatch.setattr(runtime_launch, "_loaded", found.load)
    runtime_launch.kernel_for.cache_clear()
    runtime_launch.device_of.cache_clear()
    yield found
    runtime_launch.kernel_for.cache_clear()
    runtime_launch.device_of.cache_clear()


def run(kernels, a, b, out, trans=(False, False), c=None, partial=None, alpha=1.0, beta=0.0,
        lower=False, choice=CHOICE):  # fmt: skip
    """Prepare a product, and compute it twice."""
    problem = check_product(a, b, c, partial, out, trans, alpha, beta, lower).addressable()
    kernels.k = problem.shape.k
    product = emulated_gemm.prepared(problem, choice)
    for _ in range(2):
        out[...] = np.nan
        product(problem.pointers)
    return out


def integers(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).integers(-8, 9, shape).astype("f4")


LAUNCHES = ["split_pack", "sgemm_split !", "split_residuals !", "sgemm_ffma"]
REFUSED = ["split_pack", "sgemm_split", "split_residuals", "sgemm_ffma !"]


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["C", "F", "wide rows"])
def test_four_launches_without_a_look(kernels, trans, layout):
    x, y = integers(130, 200), integers(200, 70)
    a, b = (laid_out(z.T if flag else z, layout) for z, flag in zip((x, y), trans, strict=True))
    c, p = integers(130, 70, seed=1), integers(130, 70, seed=2)
    out = laid_out(np.zeros((130, 70), "f4"), "wide rows")
    run(kernels, a, b, out, trans, gpu(c), gpu(p), alpha=2.0, beta=-3.0)
    np.testing.assert_array_equal(out, 2 * (x @ y + p) - 3 * c)
    assert kernels.ran == LAUNCHES * 2
    assert last_choice() == CHOICE
    # What seldom runs is one of few kernels, which are compiled beforehand.
    assert kernels.defines["sgemm_ffma"] in [dict(job.defines) for job in precompile.wanted(90)]


@pytest.mark.parametrize(("side", "bad"), [("a", np.nan), ("b", np.inf)])
def test_what_is_not_finite_is_computed_from_the_source(kernels, side, bad):
    x, y = integers(130, 200), integers(200, 70)
    (x if side == "a" else y)[3, 5] = bad
    with np.errstate(invalid="ignore"):
        out = run(kernels, gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
        np.testing.assert_array_equal(out, x @ y)
    assert kernels.ran == REFUSED * 2
    assert last_choice() == Choice(
        FFMA, "float32", f"operand {side} has 1 elements that are not finite"
    )


@pytest.fixture
def all_are_large(monkeypatch):
    """Small products are made ready for data of a wide range, too."""
    monkeypatch.setattr(configs, "BROAD_SECONDS", 0)
    configs.broad_pays.cache_clear()
    yield
    configs.broad_pays.cache_clear()


BROAD = ["split_pack", "sgemm_split", "split_residuals", *["broad_pack !", "sgemm_broad !"] * 2]


def graded(high, low):
    """Integers, every second one of which is scaled in A, and scaled back in B; 3 slabs."""
    x, y = integers(130, 180), integers(180, 70)
    scales = np.where(np.arange(180) % 2, high, low)
    return (x * scales).astype("f4"), (y / scales[:, None]).astype("f4"), x @ y


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_data_of_a_wide_range_is_packed_once_more(kernels, all_are_large, layout, precision):
    x, y, exact = graded(2.0**40, 1)
    c, p = integers(130, 70, seed=1), integers(130, 70, seed=2)
    out, choice = gpu(np.zeros((130, 70), "f4")), CHOICE._replace(precision=precision)
    run(kernels, laid_out(x, layout), laid_out(y, layout), out, (False, False), gpu(c), gpu(p),
        alpha=2.0, beta=-3.0, choice=choice)  # fmt: skip
    np.testing.assert_array_equal(out, 2 * (exact + p) - 3 * c)
    assert kernels.ran == [*BROAD, "sgemm_ffma"] * 2
    what = {"float32": "six products of bfloat16 parts", "tf32": "one product of TF32"}[precision]
    assert last_choice() == choice._replace(
        reason=f"operand a has over 1024 elements that FP16 parts do not carry: {what}"
    )
    found = {name: kernels.defines[name] for name in ("broad_pack", "sgemm_split")}
    assert all(
        define in [dict(x.defines) for x in precompile.wanted(90)] for define in found.values()
    )


def test_an_array_and_its_transpose_of_a_wide_range_are_packed_once(kernels, all_are_large):
    a = gpu(np.repeat([[2.0**-30], [2.0**10]], 100, 0).astype("f4") * integers(200, 70))
    out = run(kernels, a, a, gpu(np.zeros((70, 70), "f4")), (True, False), lower=True)
    wide = np.asarray(a, "f8")
    np.testing.assert_allclose(out, wide.T @ wide, rtol=1e-6)
    assert kernels.ran == [*BROAD, "sgemm_ffma"] * 2
    assert set(kernels.packed) == {70}


def test_what_other_parts_do_not_carry_either_is_computed_from_the_source(kernels, all_are_large):
    x, y, exact = graded(2.0**100, 2.0**-20)
    out = run(kernels, gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
    np.testing.assert_array_equal(out, exact)
    assert kernels.ran[:3] == REFUSED[:3]
    assert kernels.ran[3:8] == [
        "broad_pack !",
        "sgemm_broad",
        "broad_pack !",
        "sgemm_broad",
        REFUSED[3],
    ]
    assert last_choice().kernel == FFMA
    assert "elements that FP16 parts do not carry" in last_choice().reason


@pytest.mark.parametrize("room", [100_000, 48])  # for the head; for what it begins with
def test_without_memory_to_pack_in(kernels, caplog, room):
    x, y = integers(130, 200), integers(200, 70)
    kernels.room = room
    out = run(kernels, gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
    np.testing.assert_array_equal(out, x @ y)
    assert kernels.ran == ["sgemm_ffma !"] * 2
    assert last_choice() == Choice(FFMA, "float32", "no memory is left to pack the operands in")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2, "of each product"
    assert all("other bits" in sentence for sentence in said)


def test_what_a_captured_graph_will_do_depends_on_its_data(kernels, monkeypatch):
    import cupy

    freed = []
    for name, value in (
        ("streamIsCapturing", lambda stream: True),
        ("mallocAsync", lambda size, stream: kernels.graph_memory(size)),
        ("freeAsync", lambda address, stream: freed.append(address)),
    ):
        monkeypatch.setattr(cupy.cuda.runtime, name, value, raising=False)
    held = []

    def graph_memory(size):
        held.append(gpu(np.full(size, 0x55, "u1")).reshape(-1))
        return held[-1].data.ptr

    kernels.graph_memory = graph_memory
    monkeypatch.setattr(cupy.cuda, "UnownedMemory", lambda at, *_: at, raising=False)
    monkeypatch.setattr(cupy.cuda, "MemoryPointer", lambda at, _: at, raising=False)
    monkeypatch.setattr(
        cupy, "ndarray",
        lambda shape, dtype, memptr: memory(memptr, shape, (1,), dtype).view(stand_in.GPUArray),
    )  # fmt: skip
    x, y = integers(130, 200), integers(200, 70)
    out = run(kernels, gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
    np.testing.assert_array_equal(out, x @ y)
    assert kernels.allocated == []
    assert sorted(freed) == sorted(array.data.ptr for array in held)
    assert "whenever the graph's data" in last_choice().reason
