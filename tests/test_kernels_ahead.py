"""What is compiled before the first product, with NumPy in place of a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from multimm.gpu.add_config import CAPACITIES
from multimm.gpu.registry import Device, Problem, choose
from multimm.gpu.split_config import choose_split
from multimm.gpu.split_reference import pack_reference
from multimm.gpu.tiles import limits_for
from multimm.graph import kernels


@pytest.fixture
def calls(monkeypatch):
    """Names and precisions of the tasks that ran."""
    module = ModuleType("cupy")
    module.ones = np.ones
    stream = SimpleNamespace(synchronize=lambda: None)
    module.cuda = SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(kernels, "SIDE", 24)
    monkeypatch.setattr(kernels, "K", 16)
    monkeypatch.setattr(kernels, "TALL_SIDE", 8)
    monkeypatch.setattr(kernels, "TALL_K", 64)
    seen = []

    def recorded(name):
        task = getattr(kernels, name)

        def run(*blocks, **options):
            step = options.get("step")
            seen.append((name, len(blocks), step.precision if step else ""))
            return task(*blocks, **options)

        monkeypatch.setattr(kernels, name, run)

    for name in ("multiply", "multiply_diagonal", "pack", "add", "transpose"):
        recorded(name)
    return seen


def test_every_kind_of_task_runs_in_every_precision(calls):
    kernels.compile_kernels()
    for precision in kernels.PRECISIONS:
        assert ("multiply", 2, precision) in calls
        assert ("multiply", 3, precision) in calls
        assert (("pack", 1, precision) in calls) == (precision != "ieee")
        # Of a block as it is, of a tall one, and of a packed one.
        halves = calls.count(("multiply_diagonal", 2, precision))
        assert halves == (2 if precision == "ieee" else 3)
        assert calls.count(("multiply_diagonal", 1, precision)) == 1
    kinds = {"multiply", "multiply_diagonal", "pack", "add", "transpose"}
    assert {name for name, *_ in calls} == kinds
    assert {parts for name, parts, _ in calls if name == "add"} == set(CAPACITIES)


def test_the_operands_have_elements_that_packed_parts_do_not_carry():
    x = kernels._operand(np, (64, 128))
    for operand in (x, x.T):
        assert pack_reference(operand).uncarried == 1


def test_the_blocks_are_large_enough_for_the_kernels_of_large_blocks():
    device = Device(limits_for(90), 132)
    small, large = (kernels.SIDE, kernels.SIDE, kernels.K), (16384, 16384, 8192)
    assert choose(Problem(*small), device)[0] == choose(Problem(*large), device)[0]
    for products in (1, 3):
        assert choose_split(*small, products, 132)[0] == choose_split(*large, products, 132)[0]
