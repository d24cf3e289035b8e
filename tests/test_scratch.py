"""Memory that decoding threads use again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from multimm.files.scratch import UNIT, Scratch
from tests.clusters import soon


def address(memory):
    return memory.ctypes.data


def test_the_next_one_gets_the_same_memory_and_no_two_do_at_a_time():
    scratch = Scratch()
    with scratch.lent(1000) as one, scratch.lent(1000) as other:
        assert (one.size, other.size) == (1000, 1000)
        assert not np.shares_memory(one, other)
        before = {address(one), address(other)}
    with scratch.lent(900) as one, scratch.lent(UNIT) as other:
        assert {address(one), address(other)} == before


def test_no_more_is_kept_than_was_lent_at_a_time():
    scratch = Scratch()
    for size in (1, UNIT + 1, 3 * UNIT, 5):
        with scratch.lent(size):
            pass
    assert [memory.size for memory in scratch._free] == [3 * UNIT]


def test_memory_comes_back_from_who_failed():
    scratch = Scratch()
    with pytest.raises(KeyError), scratch.lent(1000):
        raise KeyError
    assert len(scratch._free) == 1


def test_what_nobody_uses_is_let_go_and_what_somebody_uses_is_not():
    scratch = Scratch(kept=0.05)
    with scratch.lent(1000):
        with scratch.lent(1000):
            pass
        threading.Event().wait(0.2)
        assert len(scratch._free) == 1
    soon(lambda: not scratch._free)
    with scratch.lent(1000):  # and again
        pass
    soon(lambda: not scratch._free)
