"""Which kernel computes a product: a pure function of sizes, precision and device."""

from __future__ import annotations

import threading

import pytest

from multimm.gpu import kernel_selection
from multimm.gpu.arch import limits_for
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, choose_kernel, last_choice, note
from multimm.gpu.simt.configs import Device
from multimm.gpu.strides import GemmSizes

H200, T4, ADA = (Device(limits_for(x), 132) for x in (90, 75, 89))


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("size", [(1024, 1024, 256), (16384, 16384, 16384), (1024, 65536, 300)])
def test_large_products_run_on_the_tensor_cores(size, precision):
    found = choose_kernel(GemmSizes(*size), precision, H200)
    assert (found.kernel, found.precision) == (SPLIT, precision)


@pytest.mark.parametrize(
    ("capability", "precision"), [(80, "float32"), (80, "tf32"), (89, "tf32"), (100, "float32")]
)
def test_large_products_run_on_other_tensor_cores_too(capability, precision):
    device = Device(limits_for(capability), 108)
    assert choose_kernel(GemmSizes(8192, 8192, 8192), precision, device).kernel == SPLIT


@pytest.mark.parametrize(
    ("sizes", "precision", "device", "reason"),
    [
        (GemmSizes(8192, 8192, 8192), "ieee", H200, "asked for"),
        (GemmSizes(8192, 8192, 8192), "float32", T4, "7.5: its tensor cores"),
        (GemmSizes(8192, 8192, 8192), "float32", ADA, "no faster for float32"),
        (GemmSizes(8192, 8192, 255), "float32", H200, "k = 255"),
        (GemmSizes(1024, 1024, 1024, 2), "tf32", H200, "stack"),
        (GemmSizes(0, 8192, 8192), "float32", H200, "0 rows or columns"),
        (GemmSizes(256, 256, 256), "float32", H200, "predicted"),
        (GemmSizes(1, 8192, 8192), "float32", H200, "1 rows or columns"),
        (GemmSizes(8192, 16, 8192), "float32", H200, "16 rows or columns"),
        (GemmSizes(512, 1024, 512), "float32", H200, "predicted"),
    ],
)
def test_others_do_not_and_say_why(sizes, precision, device, reason):
    found = choose_kernel(sizes, precision, device)
    assert found.kernel == FFMA
    assert reason in found.reason


def test_large_matrices_of_a_stack_are_multiplied_one_by_one():
    for sizes in ((2048, 2048, 2048, 2), (8192, 8192, 8192, 2)):
        assert choose_kernel(GemmSizes(*sizes), "float32", H200).kernel == SPLIT
    assert choose_kernel(GemmSizes(8192, 8192, 8192, 2), "ieee", H200).kernel == FFMA


def test_what_is_multiplied_by_zero_needs_no_tensor_cores():
    for batch in (1, 2):
        found = choose_kernel(GemmSizes(8192, 8192, 8192, batch), "float32", H200, True)
        assert found.kernel == FFMA
    assert choose_kernel(GemmSizes(8192, 8192, 8192), "float32", H200, True).reason == "alpha is 0"


def test_narrow_products_do_where_the_prediction_says_so():
    found = choose_kernel(GemmSizes(512, 65536, 8192), "float32", H200)
    assert found.kernel == SPLIT
    assert "predicted on the tensor cores" in found.reason


@pytest.mark.parametrize("reason", [None, "the data are not finite"])
def test_what_the_gpu_decides_is_asked_for_once_and_only_if_somebody_wants_to_know(reason):
    asked = []

    def unless():
        asked.append(1)
        return reason

    chosen = Choice(SPLIT, "float32", "large")
    note(chosen, unless)
    assert not asked
    for _ in range(2):
        assert last_choice() == (Choice(FFMA, "float32", reason) if reason else chosen)
    assert len(asked) == 1


def test_each_thread_has_its_own_last_choice(monkeypatch):
    monkeypatch.setattr(kernel_selection, "_noted", kernel_selection._Noted())
    assert last_choice() is None
    note(Choice(FFMA, "ieee", "for a reason"))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(last_choice()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert last_choice().reason == "for a reason"
