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


def test_what_is_multiplied_by_zero_needs_no_tensor_cores():
    for batch in (1, 2):
        found = choose_kernel(GemmSizes(8192, 8192, 8192, batch), "float32", H200, True)
        assert found.kernel == FFMA
    assert choose_kernel(GemmSizes(8192, 8192, 8192), "float32", H200, True).reason == "alpha is 0"


def test_what_the_gpu_decides_is_asked_for_once_and_only_if_somebody_wants_to_know():
    asked, decided = [], Choice(FFMA, "float32", "the data are not finite")

    def what_ran():
        asked.append(1)
        return decided

    note(Choice(SPLIT, "float32", "large"), what_ran)
    assert not asked
    assert last_choice() == last_choice() == decided
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
