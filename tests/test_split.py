"""Products of packed operands without a GPU: what is refused, and what is launched."""

from __future__ import annotations

import numpy as np
import pytest
import stand_in
from stand_in import gpu, standing_in

from multimm.errors import ArrayTypeError, DTypeError, KernelError, ShapeError
from multimm.gpu.arch import Device, limits_for
from multimm.gpu.emulated.configs import SPLIT_REGISTRY, choose_split
from multimm.gpu.emulated.pack import pack
from multimm.gpu.product import gemm
from multimm.gpu.simt.configs import REGISTRY, entry_named


@pytest.fixture
def launches():
    with standing_in():
        yield stand_in.Kernel.launches


@pytest.fixture
def operands(launches):
    """20 x 300 and 300 x 30, packed."""
    a = pack(gpu(np.ones((20, 300), "f4")), side="a")
    b = pack(gpu(np.ones((300, 30), "f4")), side="b")
    launches.clear()
    return a, b


def test_configurations_are_taken_by_value_and_name(operands, launches):
    for entry in SPLIT_REGISTRY[:2]:
        for config in (entry.name, entry.config):
            gemm(*operands, config=config)
            assert launches[-1][0].defines == entry.config.defines()
            assert launches[-1][0].max_dynamic_shared_size_bytes == entry.config.shared_bytes
    with pytest.raises(KernelError, match="other products than the 3 that are needed"):
        gemm(*operands, config=entry_named(SPLIT_REGISTRY, "tf32_wide").config)
    with pytest.raises(KernelError, match="'fast' is unknown"):
        gemm(*operands, config="fast")


def test_older_gpus_are_refused():
    with pytest.raises(KernelError, match=r"8\.0 or newer, this one has 7\.5: use precision"):
        choose_split(5, 5, (1, 2), 3, Device(limits_for(75), 40))


def test_operands_that_do_not_fit_are_refused(operands, launches):
    """What does not fit between the two is refused in `test_pack`."""
    good, wide, elsewhere = (gpu(np.zeros((20, n), np.float32)) for n in (30, 31, 30))
    elsewhere.device_id = 1
    for error, message, more in (
        (ArrayTypeError, r"several devices \({'packed': 0, 'c': 1}\)", {"beta": 1, "c": elsewhere}),
        (ShapeError, "out has shape", {"out": wide}),
        (ShapeError, "c has shape", {"beta": 1, "c": wide}),
        (ShapeError, "may share memory", {"beta": 1, "c": good, "out": good}),
        (DTypeError, "float32", {"beta": 1, "c": good.astype(np.float64)}),
        (ArrayTypeError, "CuPy", {"partial": np.zeros((20, 30), "f4")}),
        (KernelError, "none of packed operands: pass a SplitConfig", {
            "config": entry_named(REGISTRY, "large").config}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            gemm(*operands, **more)
    assert launches == []
