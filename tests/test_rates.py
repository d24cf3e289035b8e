"""Measured rates: the file that keeps them, and the plans made from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

import multimm
from multimm.cli import main
from multimm.cluster.calibration import store
from multimm.cluster.calibration.store import DeviceRates, LinkRates, Rates, applied
from multimm.errors import OptionError
from multimm.planning.cost import time
from multimm.planning.explain.workers import rates as rates_text
from multimm.planning.problem import Problem
from multimm.planning.spec import (
    H200,
    ClusterSpec,
    MatrixSpec,
)

DAY, LATER = "2026-11-21", "2026-12-24"
FAST_H200 = DeviceRates(
    H200.name, H200.gflops, 60_000.0, 3000.0, (("float32", 170_000.0),), DAY, "580.1"
)
FAST_NVLINK = LinkRates("cuda-ipc", H200.name, False, 100.0, 2e-4, DAY)
BETWEEN = LinkRates("ucxx", H200.name, True, 20.0, 3e-4, LATER)
ALL = Rates((FAST_H200,), (FAST_NVLINK, BETWEEN))


pytestmark = pytest.mark.usefixtures("rates_file")


# ------------------------------------------------------------------ what applies


def test_without_measurements_all_is_as_shipped():
    spec = ClusterSpec.homogeneous(H200, 8)
    assert applied(spec, Rates()) == spec
    assert rates_text(spec).startswith("as shipped")


def test_measured_rates_take_the_place_of_shipped_ones():
    spec = applied(ClusterSpec.homogeneous(H200, 8), ALL)
    assert {device.gflops for device in spec.devices} == {60_000.0}
    assert spec.slowest.packed_gflops == (("float32", 170_000.0),)
    assert spec.slowest.copy_gbps == 3000.0
    assert (spec.link.name, spec.link.gbps) == ("nvlink", 100.0)
    assert (spec.between.name, spec.between.gbps) == ("infiniband", 20.0)
    # All else is left alone, and applying again changes nothing.
    assert spec.slowest.memory_bytes == H200.memory_bytes
    assert applied(spec, ALL) == spec


def test_predictions_are_made_from_the_rates():
    side = MatrixSpec((16384, 16384))
    plain, packed = Problem(side, side), Problem(side, side, pack="float32")
    fast = applied(ClusterSpec.homogeneous(H200, 1), ALL).slowest
    assert time.product_gflops(plain, H200) == H200.gflops
    assert time.product_gflops(plain, fast) == 60_000.0
    shipped_rate = pytest.approx(H200.gflops / packed.relative_cost)
    assert time.product_gflops(packed, H200) == shipped_rate
    assert time.product_gflops(packed, fast) == 170_000.0
    # tf32 was not measured: scaled from what was.
    single = replace(packed, pack="tf32")
    assert time.product_gflops(single, fast) == pytest.approx(6e4 / single.relative_cost)
    double = Problem(side, side, accumulate="float64")
    assert time.product_gflops(double, fast) == 30_000.0
    shipped = multimm.plan(side, side, precision="ieee", cluster=ClusterSpec((H200,)))
    measured = multimm.plan(side, side, precision="ieee", cluster=ClusterSpec((fast,)))
    ratio = shipped.time_terms["block products"] / measured.time_terms["block products"]
    assert ratio == pytest.approx(60_000.0 / H200.gflops)
    assert f"measured {DAY}" in str(measured)
    assert "as shipped" in str(shipped)


def test_rates_must_be_positive():
    with pytest.raises(OptionError, match=r"rates .* all must be positive"):
        replace(H200, packed_gflops=(("float32", 0.0),))


# ---------------------------------------------------------------------- the file


def test_a_new_measurement_replaces_its_own_kind_alone():
    store.keep(ALL)
    again = FAST_H200._replace(gflops=5e4, measured=LATER)
    other = DeviceRates("x", 1.0, 2.0, 3.0, (), LATER)
    store.keep(Rates((again, other)))
    store.forget()  # as another process does
    assert store.stored() == Rates((again, other), ALL.links)


def run(*args):
    return CliRunner().invoke(main, list(args), prog_name="multimm")


def test_plans_for_gpus_on_paper_use_what_was_measured():
    store.keep(ALL)
    output = run("plan", "65536x65536", "65536x65536", "--gpus", "16", "--per-node", "8").output
    assert f"measured {DAY}\n" in output
    given = run("plan", "65536x65536", "65536x65536", "--gpus", "16", "--per-node", "8",
                "--node-link", "50").output  # fmt: skip
    assert "except for transfers between nodes" in given
