"""Which kernel computes a product: a pure function of sizes, precision and device."""

from __future__ import annotations

import threading

from multimm.gpu import kernel_selection
from multimm.gpu.kernel_selection import FFMA, SPLIT, Choice, last_choice, note


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
