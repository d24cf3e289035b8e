"""Skinny products without a GPU: which they are, how they are cut, and how they are launched."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import stand_in
from hypothesis import given
from hypothesis import strategies as st
from stand_in import GPUArray, gpu, laid_out, memory, standing_in

from multimm.errors import KernelError
from multimm.gpu import product
from multimm.gpu.arch import limits_for
from multimm.gpu.runtime import launch as runtime_launch
from multimm.gpu.runtime.jit import compile_text
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm.gpu.simt import split_k
from multimm.gpu.simt.configs import Device
from multimm.gpu.simt.thin import AxpyConfig, DotConfig, OuterConfig, way_for
from multimm.gpu.strides import GemmSizes
from multimm.gpu.tuning import autotune

ieee = functools.partial(product.gemm, precision="ieee")
H200 = Device(limits_for(90), 132)


class Kernel(stand_in.Kernel):
    """What the three kernels compute, in NumPy."""

    def __call__(self, grid, block, args, shared_mem=0):
        if self.name == "add_partials":
            super().__call__(grid, block, args)
            return
        stand_in.Kernel.launches.append((self, grid, block, args))
        assert block == (256 if self.name == "sgemm_outer" else 32 * self.defines["WARPS"], 1, 1)
        for z in range(grid[2]):
            self.multiply(z, grid[0], shared_mem, *args)

    def multiply(self, z, blocks, shared_mem, m, n, k, k_step, alpha, beta, *operands):
        d = self.defines
        wide = "AB"[d["TURNED"]] if d.get("WIDE") else ""

        def at(operand, height, width):
            pointer, ld, stride = (int(x) for x in operands[3 * operand : 3 * operand + 3])
            if "ABCPD"[operand] == wide:
                assert not any(x % d["CELLS"] for x in (pointer // 4, ld, stride, width))
                assert pointer % (4 * d["CELLS"]) == 0
            return memory(pointer + z * stride * 4, (height, width), (ld, 1), "f4")

        if self.name == "sgemm_outer":
            assert k <= d["THIN"]
            assert blocks == -(-m // d["BLOCK_ROWS"]) * -(-n // 121)
        else:
            side, few = (n, m) if d["TURNED"] else (m, n)
            span = d["WIDTH"] if "WIDTH" in d else d["WARPS"] // d["WARPS_K"] * d["ROWS"]
            assert few <= d["COLS"]
            assert blocks == -(-side // span)
            along_k = d["TRANS_B"] if d["TURNED"] else not d["TRANS_A"]
            assert self.name == ("sgemm_dot" if along_k else "sgemm_axpy")
        assert bool(shared_mem) == (self.name == "sgemm_axpy")
        k = min(k_step, k - z * k_step) if k_step else k
        a = at(0, k, m).T if d["TRANS_A"] else at(0, m, k)
        b = at(1, n, k).T if d["TRANS_B"] else at(1, k, n)
        total = a @ b if alpha != 0 else np.zeros((m, n), np.float32)
        if operands[9] and alpha != 0:
            total = total + at(3, m, n)
        total = alpha * total
        at(4, m, n)[...] = total + beta * at(2, m, n) if operands[6] and beta != 0 else total


@contextlib.contextmanager
def skinny_kernels():
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_launch, "_loaded", lambda text, entry, *_: Kernel(text, entry))
        patch.setattr(autotune, "winners_on", lambda device: {})
        patch.setattr(split_k, "workspace", lambda shape, device: (
            gpu(np.full(shape, np.nan, "f4")), lambda: None))  # fmt: skip
        runtime_launch.device_of.cache_clear()
        yield stand_in.Kernel.launches
    runtime_launch.device_of.cache_clear()


@pytest.fixture
def launches():
    with skinny_kernels() as found:
        yield found


def integers(seed: int, *shape: int, layout: str = "C") -> GPUArray:
    values = np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)
    return laid_out(values, layout)


def kernels(launches) -> list[str]:
    return [kernel.name for kernel, *_ in launches]


sizes = st.integers(1, 40) | st.integers(1, 2_000_000)


@given(sizes, sizes, sizes, st.integers(1, 200), st.booleans(), st.booleans(),
       st.sampled_from([1, 24, 132, 148]))  # fmt: skip
def test_every_way_fits_its_product(m, n, k, batch, scattered_a, scattered_b, multiprocessors):
    device = Device(limits_for(90), multiprocessors)
    way = way_for(GemmSizes(m, n, k, batch, scattered_a, scattered_b), device)
    if way is None:
        return
    if way.kernel == "sgemm_outer":
        assert k <= way.config.thin
        return
    assert min(m, n) <= way.config.cols < 2 * min(m, n)
    assert way.turned == (m < n)
    assert (way.kernel == "sgemm_dot") == (scattered_b if way.turned else scattered_a)
    assert way.config.shared_bytes <= 49_152
    assert (way.slices - 1) * way.length < k
    assert way.slices == 1 or (k <= way.slices * way.length and way.length % 512 == 0)
    assert way.slices < 64
    assert batch == 1 or way.slices == 1


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((3, 1, 8, 1, 8, 1), "power of two"),
        ((1, 3, 8, 1, 8, 1), "halved"),
        ((1, 1, 8, 3, 8, 1), "in one block"),
        ((1, 1, 33, 1, 8, 1), "1 to 32 warps"),
        ((16, 1, 8, 8, 8, 1), "more than 49152"),
    ],
)
def test_rules_of_dot(values, sentence):
    with pytest.raises(KernelError, match=sentence):
        DotConfig(*values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((3, 32, 8, 4, 8, 1), "power of two"),
        ((1, 32, 8, 3, 8, 1), "1, 2 or 4 words"),
        ((1, 24, 8, 4, 8, 1), "as much as any other"),
        ((1, 32, 8, 4, 0, 1), "at least one"),
        ((16, 32, 8, 4, 8, 1), "more than 49152"),
    ],
)
def test_rules_of_axpy(values, sentence):
    with pytest.raises(KernelError, match=sentence):
        AxpyConfig(*values)


def test_rules_of_outer():
    for values, sentence in (((0, 64), "k is 1 to 12"), ((13, 64), "k is"), ((4, 60), "8 warps")):
        with pytest.raises(KernelError, match=sentence):
            OuterConfig(*values)


def expected(a, b, trans_a, trans_b, alpha=1, beta=0, c=None, partial=None):
    total = np.asarray(a.swapaxes(-1, -2) if trans_a else a) @ np.asarray(
        b.swapaxes(-1, -2) if trans_b else b
    )
    total = alpha * (total + (0 if partial is None else np.asarray(partial)))
    return total + (beta * np.asarray(c) if c is not None else 0)


layouts = st.sampled_from(stand_in.LAYOUTS)


@given(
    st.sampled_from([(1, 900, 80), (900, 3, 80), (8, 400, 200), (1000, 7, 300), (750, 752, 5)]),
    st.booleans(), st.booleans(), st.sampled_from([((), ()), ((2,), ()), ((2, 1), (3,))]),
    st.tuples(layouts, layouts, layouts, layouts), st.sampled_from([None, *stand_in.LAYOUTS[:4]]),
    st.sampled_from([0.0, 1.0, -0.5]), st.sampled_from([0.0, 2.0]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_gemm_hands_the_right_memory_to_the_kernel(
    mnk, trans_a, trans_b, batch, orders, into, alpha, beta, with_c, with_partial
):
    m, n, k = mnk
    a = integers(1, *batch[0], *((k, m) if trans_a else (m, k)), layout=orders[0])
    b = integers(2, *batch[1], *((n, k) if trans_b else (k, n)), layout=orders[1])
    stack = np.broadcast_shapes(*batch)
    c = integers(3, *stack, m, n, layout=orders[2]) if with_c else None
    partial = integers(4, m, n, layout=orders[3]) if with_partial else None
    with skinny_kernels() as launches:
        out = laid_out(np.full((*stack, m, n), np.nan, "f4"), into) if into else None
        result = ieee(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta * with_c, c=c,
                             partial=partial, out=out)  # fmt: skip
        assert set(kernels(launches)) <= {"sgemm_dot", "sgemm_axpy", "sgemm_outer"}
    given_c = c if with_c and beta else None
    wanted = expected(a, b, trans_a, trans_b, alpha, beta, given_c, partial)
    np.testing.assert_array_equal(np.asarray(result), wanted)
    assert out is None or result is out


def test_without_memory_for_slices_the_product_is_made_in_one_piece(launches, monkeypatch, caplog):
    monkeypatch.setattr(split_k, "workspace", stand_in.no_memory)
    a, b = integers(1, 20, 200_000), integers(2, 200_000, 3)
    for _ in range(2):  # the second time by what was kept
        np.testing.assert_array_equal(np.asarray(ieee(a, b)), np.asarray(a) @ np.asarray(b))
    assert kernels(launches) == ["sgemm_dot"] * 2
    assert caplog.text.count("runs in one piece, slower and with other bits") == 2


#: Of every kernel the configurations of the six shapes that are measured, and the largest.
SHIPPED = [
    ("sgemm_dot", way_for(GemmSizes(4096, 1, 4096, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_dot", way_for(GemmSizes(1000, 1, 8192, 1, True), H200).config, (0, 1, 1)),
    ("sgemm_dot", way_for(GemmSizes(8192, 8, 8192, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_dot", way_for(GemmSizes(8192, 16, 8192, 1, True), H200).config, (0, 0, 0)),
    ("sgemm_axpy", way_for(GemmSizes(1, 4096, 4096, 1), H200).config, (0, 0, 1)),
    ("sgemm_axpy", way_for(GemmSizes(8, 8192, 8192, 1), H200).config, (0, 0, 1)),
    ("sgemm_outer", OuterConfig(7, 128), (0, 0, 0)),
    ("sgemm_outer", OuterConfig(12, 256), (0, 0, 0)),
]


@pytest.mark.parametrize(("kernel", "config", "flags"), SHIPPED, ids=str)
def test_kernels_compile_without_spills(kernel, config, flags):
    defines = {
        **config.defines(),
        **dict(zip(("TRANS_A", "TRANS_B", "TURNED"), flags, strict=True)),
    }
    if kernel == "sgemm_axpy":
        defines["WIDE"] = 1
    usage = compile_text(kernel_text(f"{kernel}.cu", defines), "sm_90").usage[kernel]
    assert usage.spilled == 0
    blocks = getattr(config, "min_blocks", 2)
    assert usage.registers * config.threads * blocks <= 65_536
    if isinstance(config, DotConfig):
        assert usage.shared <= config.static_shared_bytes
