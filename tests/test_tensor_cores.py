"""Products of arrays on the tensor cores, with NumPy for the kernels: what is launched, and why."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from stand_in import Kernel, captured, gpu, laid_out, no_memory

from multimm.gpu import precompile
from multimm.gpu.emulated import configs
from multimm.gpu.emulated import gemm as emulated_gemm
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, last_choice
from multimm.gpu.problem import check_product

CHOICE = Choice(SPLIT, "float32", "large")
pytestmark = pytest.mark.usefixtures("gpu_in_numpy")


def run(a, b, out, trans=(False, False), c=None, partial=None, alpha=1.0, beta=0.0,
        lower=False, choice=CHOICE):  # fmt: skip
    """Prepare a product, and compute it twice."""
    problem = check_product(a, b, c, partial, out, trans, alpha, beta, lower).addressable()
    product = emulated_gemm.prepared(problem, choice)
    for _ in range(2):
        out[...] = np.nan
        product(problem.pointers)
    return out


def integers(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).integers(-8, 9, shape).astype("f4")


def assert_compiled_beforehand():
    wanted = [(f"{job.file}", dict(job.defines)) for job in precompile.wanted(90)]
    for kernel, *_ in Kernel.launches:
        assert (f"{kernel.name}.cu", kernel.defines) in wanted


LAUNCHES = ["split_pack", "sgemm_split !", "split_residuals !", "sgemm_ffma"]
REFUSED = ["split_pack", "sgemm_split", "split_residuals", "sgemm_ffma !"]


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["C", "F", "wide rows"])
def test_four_launches_without_a_look(trans, layout):
    x, y = integers(130, 200), integers(200, 70)
    a, b = (laid_out(z.T if flag else z, layout) for z, flag in zip((x, y), trans, strict=True))
    c, p = integers(130, 70, seed=1), integers(130, 70, seed=2)
    out = laid_out(np.zeros((130, 70), "f4"), "wide rows")
    run(a, b, out, trans, gpu(c), gpu(p), alpha=2.0, beta=-3.0)
    np.testing.assert_array_equal(out, 2 * (x @ y + p) - 3 * c)
    assert Kernel.ran == LAUNCHES * 2
    assert last_choice() == CHOICE
    # What seldom runs is one of few kernels, which are compiled beforehand.
    assert_compiled_beforehand()


@pytest.mark.parametrize(("side", "bad"), [("a", np.nan), ("b", np.inf)])
def test_what_is_not_finite_is_computed_from_the_source(side, bad):
    x, y = integers(130, 200), integers(200, 70)
    (x if side == "a" else y)[3, 5] = bad
    with np.errstate(invalid="ignore"):
        out = run(gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
        np.testing.assert_array_equal(out, x @ y)
    assert Kernel.ran == REFUSED * 2
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


BROAD = [
    "split_pack",
    "sgemm_split",
    "split_residuals",
    *["broad_pack !", "sgemm_split_broad !"] * 2,
]


def graded(high, low):
    """Integers, every second one of which is scaled in A, and scaled back in B; 3 slabs."""
    x, y = integers(130, 180), integers(180, 70)
    scales = np.where(np.arange(180) % 2, high, low)
    return (x * scales).astype("f4"), (y / scales[:, None]).astype("f4"), x @ y


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_data_of_a_wide_range_is_packed_once_more(all_are_large, layout, precision):
    x, y, exact = graded(2.0**40, 1)
    c, p = integers(130, 70, seed=1), integers(130, 70, seed=2)
    out, choice = gpu(np.zeros((130, 70), "f4")), CHOICE._replace(precision=precision)
    run(laid_out(x, layout), laid_out(y, layout), out, (False, False), gpu(c), gpu(p),
        alpha=2.0, beta=-3.0, choice=choice)  # fmt: skip
    np.testing.assert_array_equal(out, 2 * (exact + p) - 3 * c)
    assert Kernel.ran == [*BROAD, "sgemm_ffma"] * 2
    what = {"float32": "six products of bfloat16 parts", "tf32": "one product of TF32"}[precision]
    assert last_choice() == choice._replace(
        reason=f"operand a has over 1024 elements that FP16 parts do not carry: {what}"
    )
    assert_compiled_beforehand()


def test_an_array_and_its_transpose_of_a_wide_range_are_packed_once(all_are_large):
    a = gpu(np.repeat([[2.0**-30], [2.0**10]], 100, 0).astype("f4") * integers(200, 70))
    out = run(a, a, gpu(np.zeros((70, 70), "f4")), (True, False), lower=True)
    wide = np.asarray(a, "f8")
    np.testing.assert_allclose(out, wide.T @ wide, rtol=1e-6)
    assert Kernel.ran == [*BROAD, "sgemm_ffma"] * 2
    packed = [args for kernel, _, _, args in Kernel.launches if kernel.name == "split_pack"]
    assert all(args[0].tobytes().count(bytes(112)) == 1 for args in packed), "one operand"


def test_what_other_parts_do_not_carry_either_is_computed_from_the_source(all_are_large):
    x, y, exact = graded(2.0**100, 2.0**-20)
    out = run(gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
    np.testing.assert_array_equal(out, exact)
    assert Kernel.ran[:3] == REFUSED[:3]
    assert Kernel.ran[3:8] == [
        "broad_pack !",
        "sgemm_split_broad",
        "broad_pack !",
        "sgemm_split_broad",
        REFUSED[3],
    ]
    assert last_choice().kernel == FFMA
    assert "elements that FP16 parts do not carry" in last_choice().reason


@pytest.mark.parametrize("room", [100_000, 48])  # for the head; for what it begins with
def test_without_memory_to_pack_in(monkeypatch, caplog, room):
    cupy = sys.modules["cupy"]
    x, y, empty = integers(130, 200), integers(200, 70), cupy.empty

    def within_room(shape, dtype):
        made = empty(shape, dtype)
        return made if made.nbytes <= room else no_memory()

    monkeypatch.setattr(cupy, "empty", within_room)
    out = run(gpu(x), gpu(y), gpu(np.zeros((130, 70), "f4")))
    np.testing.assert_array_equal(out, x @ y)
    assert Kernel.ran == ["sgemm_ffma !"] * 2
    assert last_choice() == Choice(FFMA, "float32", "no memory is left to pack the operands in")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2, "of each product"
    assert all("other bits" in sentence for sentence in said)


def test_what_a_captured_graph_will_do_depends_on_its_data():
    x, y, out = integers(130, 200), integers(200, 70), gpu(np.zeros((130, 70), "f4"))
    with captured():
        run(gpu(x), gpu(y), out)
    np.testing.assert_array_equal(out, x @ y)
    taken, freed = ([name[5:] for name in Kernel.ran if name[:4] == verb]
                    for verb in ("take", "free"))  # fmt: skip
    assert sorted(taken) == sorted(freed) != []
    assert "whenever the graph's data" in last_choice().reason
