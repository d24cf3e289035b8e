"""Launching without a GPU: checks, layouts, batches and scalar types.

A module named cupy, made of NumPy arrays, stands in for CuPy. Its kernels do what the CUDA
kernels do with the very arguments they are given: addresses, leading dimensions, batch strides.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import below, no_memory

from multimm.errors import ArrayTypeError, DTypeError, KernelError, ShapeError
from multimm.gpu import product
from multimm.gpu.emulated.configs import SPLIT_REGISTRY
from multimm.gpu.kernel_selection import FFMA, Choice, last_choice
from multimm.gpu.runtime import launch as runtime_launch
from multimm.gpu.runtime import launch_cache
from multimm.gpu.simt import gemm as simt_gemm
from multimm.gpu.simt import split_k
from multimm.gpu.simt.configs import REGISTRY
from multimm.gpu.tuning import autotune

ieee = functools.partial(product.gemm, precision="ieee")


class GPUArray(np.ndarray):
    """A NumPy array with the attributes that set a CuPy array apart."""

    __module__ = "cupy"
    device_id = 0

    @property
    def device(self):
        return SimpleNamespace(id=self.device_id)

    @property
    def data(self):
        address = self.__array_interface__["data"][0]
        return SimpleNamespace(ptr=address, device_id=self.device_id)


def matrices(pointer, height, width, ld, itemsize, kind):
    """The matrix at an address, as a kernel would walk it."""
    if height == 0 or width == 0:
        return np.zeros((height, width), kind)
    size = ((height - 1) * ld + width) * itemsize
    memory = np.frombuffer((ctypes.c_char * size).from_address(int(pointer)), kind)
    return np.lib.stride_tricks.as_strided(
        memory, (height, width), (int(ld) * itemsize, itemsize), writeable=True
    )


class Kernel:
    """What kernels/sgemm_ffma.cu computes, in NumPy."""

    launches: list

    def __init__(self, text, name, options=()):
        text = text.partition("#line")[0]  # what follows has defaults for editors
        self.defines = {k: int(v) for k, v in re.findall(r"^#define (\w+) (\d+)$", text, re.M)}
        self.name = name

    def __call__(self, grid, block, args, shared_mem=0):
        Kernel.launches.append((self, grid, block, args))
        assert all(isinstance(value, int | np.float32) for value in args)
        assert 1 <= grid[0] < 2**31
        assert grid[1] == 1
        assert 1 <= grid[2] <= 65535
        for z in range(grid[2]):
            getattr(self, self.name)(z, *args)

    def sgemm_ffma(self, z, m, n, k, k_step, alpha, beta, *operands):
        def at(operand, height, width):
            pointer, ld, stride = operands[3 * operand : 3 * operand + 3]
            if operand < 2 and self.defines["WIDE_" + "AB"[operand]]:
                assert not any(int(value) % 4 for value in (pointer // 4, ld, stride, width))
                assert pointer % 16 == 0
            return matrices(int(pointer) + z * int(stride) * 4, height, width, ld, 4, np.float32)

        k = min(k_step, k - z * k_step) if k_step else k
        a = at(0, k, m).T if self.defines["TRANS_A"] else at(0, m, k)
        b = at(1, n, k).T if self.defines["TRANS_B"] else at(1, k, n)
        total = a @ b if alpha != 0 else np.zeros((m, n), np.float32)
        if operands[9] and alpha != 0:
            total = total + at(3, m, n)
        total = alpha * total
        total = total + beta * at(2, m, n) if operands[6] and beta != 0 else total
        made = np.ones((m, n), bool)
        if "LOWER" in self.defines:
            made = below(m, n, self.defines["BLOCK_M"], self.defines["BLOCK_N"])
        at(4, m, n)[made] = total[made]


class Device(contextlib.nullcontext):
    compute_capability = "90"
    attributes = {"MultiProcessorCount": 132}  # noqa: RUF012

    def __init__(self, ident):
        super().__init__()


def fake_cupy() -> ModuleType:
    module = ModuleType("cupy")
    module.empty = lambda shape, dtype: np.empty(shape, dtype).view(GPUArray)
    module.ascontiguousarray = lambda x: np.ascontiguousarray(x).view(GPUArray)
    module.copyto = np.copyto
    module.RawKernel = Kernel
    module.ndarray = GPUArray
    runtime = SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda stream: False)
    stream = SimpleNamespace(ptr=0)
    module.cuda = SimpleNamespace(Device=Device, runtime=runtime, get_current_stream=lambda: stream)
    return module


@pytest.fixture(autouse=True, scope="module")
def cupy():
    """The stand-in, for as long as this file's tests run; the kernel cache forgets it after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake_cupy())
        patch.setattr(runtime_launch, "_loaded", lambda text, entry, *_: Kernel(text, entry))
        patch.setattr(autotune, "winners_on", lambda device: {})
        runtime_launch.kernel_for.cache_clear()
        runtime_launch.device_of.cache_clear()
        launch_cache.forget()
        yield sys.modules["cupy"]
    launch_cache.forget()
    runtime_launch.kernel_for.cache_clear()
    runtime_launch.device_of.cache_clear()


@pytest.fixture(autouse=True)
def launches():
    Kernel.launches = []
    return Kernel.launches


LAYOUTS = ("C", "F", "wide rows", "wide columns", "every second", "reversed")


def laid_out(values: np.ndarray, layout: str) -> GPUArray:
    """The same values with other strides."""
    *batch, rows, cols = values.shape
    if layout == "C":
        x = np.ascontiguousarray(values)
    elif layout == "F":
        x = np.ascontiguousarray(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    elif layout == "wide rows":
        x = np.full((*batch, rows, cols + 3), np.nan, values.dtype)[..., 1 : cols + 1]
    elif layout == "wide columns":
        x = np.full((*batch, cols, rows + 5), np.nan, values.dtype)[..., :rows].swapaxes(-1, -2)
    elif layout == "every second":
        x = np.full((*batch, rows, 2 * cols), np.nan, values.dtype)[..., ::2]
    else:
        x = np.empty_like(values)[..., ::-1, ::-1]
    if layout not in "CF":
        x[...] = values
    return x.view(GPUArray)


def integers(seed: int, shape: tuple[int, ...], layout: str = "C") -> GPUArray:
    rng = np.random.default_rng(seed)
    return laid_out(rng.integers(-8, 9, shape).astype(np.float32), layout)


sizes = st.integers(0, 7)
layouts = st.sampled_from(LAYOUTS)
stacks = st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 1), (3,)), ((2, 3), (2, 3)),
                          ((1,), (4,)), ((2, 1, 2), (3, 1))])  # fmt: skip


@given(
    st.tuples(sizes, sizes, sizes), stacks, st.booleans(), st.booleans(),
    st.tuples(layouts, layouts, layouts, layouts), st.sampled_from([None, *LAYOUTS[:4]]),
    st.sampled_from([0.0, 1.0, -0.5]), st.sampled_from([0.0, 1.0, 2.0]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_gemm_hands_the_right_memory_to_the_kernel(
    mnk, batch, trans_a, trans_b, orders, out_layout, alpha, beta, with_c, with_partial
):
    m, n, k = mnk
    a = integers(1, (*batch[0], *((k, m) if trans_a else (m, k))), orders[0])
    b = integers(2, (*batch[1], *((n, k) if trans_b else (k, n))), orders[1])
    stack = np.broadcast_shapes(*batch)
    c = integers(3, (*stack, m, n), orders[2]) if with_c else None
    partial = integers(4, (m, n), orders[3]) if with_partial else None
    out = None
    if out_layout is not None:
        out = laid_out(np.full((*stack, m, n), np.nan, np.float32), out_layout)
    result = ieee(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta * with_c, c=c,
                         partial=partial, out=out)  # fmt: skip

    total = np.asarray(a.swapaxes(-1, -2) if trans_a else a) @ np.asarray(
        b.swapaxes(-1, -2) if trans_b else b
    )
    expected = alpha * (total + (0 if partial is None else np.asarray(partial)))
    expected = expected + (beta * np.asarray(c) if with_c else 0)
    np.testing.assert_array_equal(np.asarray(result), expected)
    assert result.dtype == np.float32
    assert out is None or result is out
    assert out is not None or result.flags.c_contiguous


@pytest.mark.parametrize("trans_b", [False, True])
def test_of_a_lower_product_the_tiles_above_the_diagonal_are_left_alone(launches, trans_b):
    a, b = integers(1, (2, 700, 50)), integers(2, (700, 50) if trans_b else (50, 700))
    c, partial = integers(3, (2, 700, 700)), integers(4, (700, 700))
    out = np.full((2, 700, 700), 77, np.float32).view(GPUArray)
    exact = np.asarray(a) @ np.asarray(b.T if trans_b else b)
    for _ in range(2):  # the second time, what the first one decided is not taken for all of it
        ieee(a, b, trans_b=trans_b, alpha=2, beta=3, c=c, partial=partial, out=out,
                    lower=True)  # fmt: skip
        expected = 2 * (exact + np.asarray(partial)) + 3 * np.asarray(c)
        np.testing.assert_array_equal(np.tril(out), np.tril(expected))
        assert out[0, 0, -1] == 77
    ieee(a, b, trans_b=trans_b, alpha=2, beta=3, c=c, partial=partial, out=out)
    np.testing.assert_array_equal(np.asarray(out), expected)
    assert ["LOWER" in kernel.defines for kernel, *_ in launches] == [True, True, False]
    turned = np.zeros((700, 700), np.float32).T.view(GPUArray)
    ieee(a[0], b, trans_b=trans_b, out=turned, lower=True)
    np.testing.assert_array_equal(np.asarray(turned), exact[0])
    with pytest.raises(ShapeError, match="the product is 4 x 5: only a square one"):
        ieee(integers(1, (4, 3)), integers(2, (3, 5)), lower=True)


def adding(operands, order, alpha, beta, guard):
    """What gpu.elementwise.reduce prepares, in NumPy: for other operands laid out like these."""
    assert order == (0, 1)
    assert guard == ()
    layouts = [(*x.shape, x.strides[0] // 4) for x in operands]

    def run(pointers):
        views = [
            matrices(pointer, *layout, 4, np.float32)
            for pointer, layout in zip(pointers, layouts, strict=True)
        ]
        *addends, out = views
        addend = beta * addends.pop() if beta else 0
        out[...] = alpha * sum(addends) + addend

    return run


@pytest.mark.parametrize("batch", [(), (1,)])
def test_without_memory_for_slices_the_product_is_made_in_one_piece(
    launches, monkeypatch, caplog, batch
):
    monkeypatch.setattr(split_k, "workspace", no_memory)
    a, b = integers(1, (*batch, 40, 5000), "wide rows"), integers(2, (5000, 30))
    c, partial = integers(3, (*batch, 40, 30), "wide rows"), integers(4, (40, 30))
    expected = 2 * (np.asarray(a) @ np.asarray(b) + np.asarray(partial)) - 3 * np.asarray(c)
    for _ in range(2):  # the second time by what was kept
        out = ieee(a, b, alpha=2, beta=-3, c=c, partial=partial)
        np.testing.assert_array_equal(np.asarray(out), expected)
    assert [(grid[2], args[3]) for _, grid, _, args in launches] == [(1, 0)] * 2
    assert caplog.text.count("runs in one piece, slower and with other bits") == 2


def test_slices_of_a_captured_product_live_in_memory_of_the_graph(launches, monkeypatch, cupy):
    """The pool may give its memory to others while the graph is still replayed."""
    memory = np.full(2**18, np.nan, np.float32)
    address, events = memory.__array_interface__["data"][0], []

    def allocate(size, stream):
        assert size <= memory.nbytes
        events.append(("allocated", size, stream))
        return address

    def array(shape, dtype, memptr):
        return memory[: np.prod(shape)].reshape(shape).view(GPUArray)

    def add(operands, order, alpha, beta, guard):
        run = adding(operands, order, alpha, beta, guard)
        return lambda pointers: events.append(("added", pointers[0])) or run(pointers)

    monkeypatch.setattr(split_k.reduce, "prepared_sum", add)
    cuda = cupy.cuda
    for holder, name, value in (
        (cuda.runtime, "streamIsCapturing", lambda stream: stream == 99),
        (cuda.runtime, "mallocAsync", allocate),
        (cuda.runtime, "freeAsync", lambda *freed: events.append(("freed", *freed))),
        (cuda, "get_current_stream", lambda: SimpleNamespace(ptr=99)),
        (cuda, "UnownedMemory", lambda pointer, size, owner, device: (pointer, size)),
        (cuda, "MemoryPointer", lambda owned, offset: owned),
        (cupy, "ndarray", array),
    ):
        monkeypatch.setattr(holder, name, value, raising=False)
    a, b = integers(1, (40, 5000)), integers(2, (5000, 30))
    out = ieee(a, b, tuned=False)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(a) @ np.asarray(b))
    (first, size, stream), added, freed = events  # to decide nothing was allocated
    assert (first, stream) == ("allocated", 99)
    assert size >= 4 * 40 * 30 * launches[0][1][2]
    assert added == ("added", address)
    assert freed == ("freed", address, 99)


def test_copies_are_refused_where_a_graph_is_captured(launches, monkeypatch, cupy):
    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda stream: True)
    a, b = integers(1, (5, 7)), integers(2, (7, 3))
    with pytest.raises(
        KernelError, match=r"\(5, 7\) with strides \(-28, -4\) is copied first, into"
    ):
        ieee(integers(1, (5, 7), "reversed"), b)
    with pytest.raises(KernelError, match="pass an array with contiguous rows"):
        ieee(a, b, beta=1, c=integers(3, (5, 3), "F"))
    assert launches == []
    ieee(integers(1, (5, 7), "F"), b)


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0)])
def test_empty_results_launch_nothing(launches, m, n):
    assert ieee(integers(1, (m, 4)), integers(2, (4, n))).shape == (m, n)
    assert launches == []


def test_operands_are_checked_before_anything_runs(launches):
    a, b = integers(1, (2, 3)), integers(2, (3, 5))
    elsewhere = integers(2, (3, 5))
    elsewhere.device_id = 1
    big, square = integers(3, (8, 16)), integers(4, (4, 4))
    for error, sentence, call in (
        (ShapeError, "the 3 columns of a must equal the 2 rows of b", lambda: ieee(a, a)),
        (ShapeError, "a matrix or a stack", lambda: ieee(a[0], b)),
        (ShapeError, "must broadcast", lambda: ieee(
            integers(1, (2, 2, 2)), integers(1, (3, 2, 2)))),
        (ShapeError, r"c has shape \(1, 5\)", lambda: ieee(a, b, c=b[:1], beta=1)),
        (ShapeError, "out has shape", lambda: ieee(a, b, out=b)),
        (ShapeError, "out and a may share", lambda: ieee(
            big[:2, :3], b, out=big[:2, 2:7])),
        (ShapeError, "out and a may share", lambda: ieee(square, square, out=square)),
        (ShapeError, "cannot be written to", lambda: ieee(a, b, out=big[:2, :10:2])),
        (ShapeError, "some elements", lambda: ieee(
            a, b, out=np.broadcast_to(big[:1, :5], (2, 5)).view(GPUArray))),
        (DTypeError, "b has dtype float64", lambda: ieee(
            a, b.astype(np.float64).view(GPUArray))),
        (ArrayTypeError, "b is a numpy.ndarray", lambda: ieee(a, np.asarray(b))),
        (ArrayTypeError, "several devices", lambda: ieee(a, elsewhere)),
        (KernelError, "'best' is unknown", lambda: ieee(a, b, config="best")),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    assert launches == []


def test_neighbouring_columns_of_one_matrix_do_not_overlap():
    big = integers(3, (8, 16))
    a, b = np.asarray(big[:, :8]).copy(), np.asarray(integers(2, (8, 8)))
    ieee(big[:, :8], integers(2, (8, 8)), out=big[:, 8:])
    np.testing.assert_array_equal(np.asarray(big[:, 8:]), a @ b)
    np.testing.assert_array_equal(np.asarray(big[:, :8]), a)


def test_a_product_of_the_same_kind_decides_nothing_again(launches, monkeypatch):
    a, b = integers(1, (20, 30)), integers(2, (30, 40))
    ieee(a, b)
    monkeypatch.setattr(simt_gemm, "choose", None)
    for seed in (3, 4):
        a[...], b[...] = integers(seed, a.shape), integers(seed + 10, b.shape)
        result = ieee(a, b)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(a) @ np.asarray(b))
    assert len(launches) == 3


def test_each_precision_is_kept_with_its_own_reason(launches):
    a, b = integers(1, (20, 30)), integers(2, (30, 40))
    launch_cache.forget()
    reasons = {"float32": "k = 30 is shorter than 256", "ieee": "FP32 multiply-adds were asked for"}
    for promise in reasons:
        assert launch_cache.product(a, b, promise) is None
        product.gemm(a, b, precision=promise)
    for promise, reason in reasons.items():
        np.testing.assert_array_equal(
            launch_cache.product(a, b, promise), np.asarray(a) @ np.asarray(b)
        )
        assert last_choice() == Choice(FFMA, promise, reason)
    assert len(launches) == 4


def test_a_configuration_is_named_for_one_call_alone(launches):
    a, b = integers(1, (20, 30)), integers(2, (30, 40))
    launch_cache.forget()
    for _ in range(2):
        product.gemm(a, b, config="wide")
        assert last_choice().kernel == FFMA
    assert launch_cache.product(a, b, "float32") is None
    product.gemm(a, b)
    assert [kernel.defines["BLOCK_N"] for kernel, *_ in launches[:2]] == [128, 128]
    assert launches[2][0].defines["BLOCK_N"] != 128
    with pytest.raises(KernelError, match="is none of sgemm_ffma: pass a TileConfig"):
        product.gemm(a, b, config=SPLIT_REGISTRY[0].config)


def test_a_tuned_configuration_is_used_unless_it_is_not_wanted(launches, monkeypatch):
    a, b = integers(1, (24, 30)), integers(2, (40, 30))
    asked = []

    def lookup(device, sizes, *sides):
        asked.append((device, sizes.m, sizes.n, sizes.k, sides))
        return REGISTRY[0].config

    monkeypatch.setattr(autotune, "lookup", lookup)
    ieee(a, b, trans_b=True)
    ieee(a, b, trans_b=True, tuned=False)
    ieee(a, b, trans_b=True, config=REGISTRY[1].name)
    blocks = [kernel.defines["BLOCK_K"] for kernel, *_ in launches]
    assert asked == [(0, 24, 40, 30, (False, True))]
    assert blocks[0] == REGISTRY[0].config.block_k
    assert blocks[2] == REGISTRY[1].config.block_k
