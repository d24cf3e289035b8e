"""Measured rates: the file that keeps them, and the plans made from them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from kept import slowly

import multimm
import multimm.cluster as mc
from multimm.cli import main
from multimm.cluster.calibration import store
from multimm.cluster.calibration.store import DeviceRates, LinkRates, Rates, applied
from multimm.cluster.inspect.cluster_spec import spec_of
from multimm.errors import OptionError
from multimm.gpu.runtime import file_cache
from multimm.planning.cost import time
from multimm.planning.explain import rates_text
from multimm.planning.problem import Problem
from multimm.planning.spec import (
    H200,
    LOCAL_TCP,
    NVLINK,
    SHARED_MEMORY,
    ClusterSpec,
    DeviceSpec,
    MatrixSpec,
)

#: Where the other tests of this session keep what may be kept.
SESSION = os.environ["MULTIMM_CACHE_DIR"]
DAY, LATER = "2026-11-21", "2026-12-24"
CPU = DeviceSpec("cpu", "cpu", 2**31, 30.0, 10.0)
FAST_H200 = DeviceRates(H200.name, H200.gflops, 60_000.0, (("float32", 170_000.0),), DAY)
FAST_NVLINK = LinkRates("ucxx", H200.name, False, 100.0, 120.0, 2e-4, DAY)
BETWEEN = LinkRates("ucxx", H200.name, True, 20.0, 40.0, 3e-4, LATER)
ALL = Rates((FAST_H200,), (FAST_NVLINK, BETWEEN))


pytestmark = pytest.mark.usefixtures("rates_file")


def another_process():
    """Forget all but the file, as the next process does."""
    store.forget()


# ------------------------------------------------------------------ what applies


def test_other_tests_know_nobodys_rates():
    assert Path(SESSION).name != "multimm" or ".pytest_cache" in SESSION
    assert not Path(SESSION, "rates.json").exists()


def test_without_measurements_all_is_as_shipped():
    spec = ClusterSpec.homogeneous(H200, 8)
    assert applied(spec, Rates()) == spec
    assert rates_text(spec) == "rates as shipped"


def test_measured_rates_take_the_place_of_shipped_ones():
    spec = applied(ClusterSpec.homogeneous(H200, 8), ALL)
    assert {device.gflops for device in spec.devices} == {60_000.0}
    assert spec.slowest.packed_gflops == (("float32", 170_000.0),)
    assert (spec.link.name, spec.link.gbps) == ("nvlink", 100.0)
    assert (spec.between.name, spec.between.gbps) == ("infiniband", 20.0)
    # All else is left alone, and applying again changes nothing.
    assert spec.slowest.memory_bytes == H200.memory_bytes
    assert applied(spec, ALL) == spec


@pytest.mark.parametrize(("measured", "taken"), [(2e-4, NVLINK.latency_s), (0.01, 0.01)])
def test_a_lone_fetch_is_the_least_that_those_of_a_product_take(measured, taken):
    found = ALL._replace(links=tuple(x._replace(latency_s=measured) for x in ALL.links))
    assert applied(ClusterSpec.homogeneous(H200, 8), found).link.latency_s == taken


def test_rates_hold_for_their_kind_only():
    two_cores = replace(CPU, gflops=60.0)
    spec = ClusterSpec((CPU, two_cores, replace(CPU, name="arm")))
    found = applied(spec, Rates((DeviceRates("cpu", 60.0, 99.0, (("tf32", 5.0),), DAY),)))
    assert [device.gflops for device in found.devices] == [30.0, 99.0, 30.0]
    assert [device.measured for device in found.devices] == ["", DAY, ""]
    assert found.devices[1].packed_gflops == ()  # it does not pack


@pytest.mark.parametrize("change", [{"protocol": "tls"}, {"devices": "arm"}])
def test_links_hold_for_their_protocol_and_devices_only(change):
    way = LinkRates("tcp", "cpu", False, 3.0, 4.0, 1e-4, DAY)
    spec = ClusterSpec((CPU, CPU), LOCAL_TCP, ("tcp://a:1", "tcp://a:2"), between=LOCAL_TCP)
    assert applied(spec, Rates((), (way,))).link.gbps == 3.0
    assert applied(spec, Rates((), (way,))).between == LOCAL_TCP
    assert applied(spec, Rates((), (way._replace(**change),))) == spec


def test_workers_strewn_over_hosts_get_the_rate_between_hosts():
    spec = applied(ClusterSpec.homogeneous(H200, 3), ALL, scattered=True)
    assert spec.link.gbps == spec.between.gbps == 20.0


def test_the_text_says_what_was_measured_and_when():
    paper = ClusterSpec.homogeneous(H200, 8)
    nodes = replace(paper, per_node=4)
    assert rates_text(applied(paper, ALL)) == f"rates measured {DAY}"
    without = Rates((FAST_H200,))
    assert rates_text(applied(paper, without)) == f"rates measured {DAY} except for transfers"
    alone = ClusterSpec.homogeneous(H200, 1)
    assert rates_text(applied(alone, without)) == f"rates measured {DAY}"
    assert rates_text(applied(nodes, ALL)) == f"rates measured {DAY}"
    inside = Rates((FAST_H200,), (FAST_NVLINK,))
    expected = f"rates measured {DAY} except for transfers between nodes"
    assert rates_text(applied(nodes, inside)) == expected
    links = Rates((), ALL.links)
    assert rates_text(applied(paper, links)) == f"rates measured {DAY} except for products"
    mixed = replace(paper, devices=(*applied(alone, ALL).devices, CPU))
    assert rates_text(mixed) == "rates as shipped"
    threads = ClusterSpec(applied(alone, ALL).devices * 2, SHARED_MEMORY)
    assert rates_text(threads) == f"rates measured {DAY}"


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
    assert f"rates measured {DAY}" in str(measured)
    assert "rates as shipped" in str(shipped)


def test_rates_must_be_positive():
    with pytest.raises(OptionError, match=r"rates .* all must be positive"):
        replace(H200, packed_gflops=(("float32", 0.0),))


# ---------------------------------------------------------------------- the file


def test_rates_are_found_by_the_next_process(rates_file):
    assert store.keep(ALL) == rates_file
    assert store.stored() == ALL
    another_process()
    assert store.stored() == ALL


def test_a_new_measurement_replaces_its_own_kind_alone():
    store.keep(ALL)
    again, other = FAST_H200._replace(gflops=5e4, measured=LATER), DeviceRates("x", 1.0, 2.0, (),
                                                                               LATER)  # fmt: skip
    store.keep(Rates((again, other)))
    another_process()
    assert store.stored() == Rates((again, other), ALL.links)


def test_what_another_process_wrote_meanwhile_is_kept():
    assert store.stored() == Rates()  # read before
    mine = dict(store._known)
    store.keep(Rates((FAST_H200,)))
    store._known.update(mine)
    store.keep(Rates((), (BETWEEN,)))
    another_process()
    assert store.stored() == Rates((FAST_H200,), (BETWEEN,))


def test_who_measures_at_the_same_time_loses_no_rates(monkeypatch):
    kinds = [FAST_H200._replace(name=f"gpu {i}") for i in range(8)]
    monkeypatch.setattr(store, "_read", slowly(store._read))
    with ThreadPoolExecutor(len(kinds)) as pool:
        assert all(pool.map(lambda kind: store.keep(Rates((kind,))), kinds))
    another_process()
    assert set(store.stored().devices) == set(kinds)


def damaged(change):
    """The file's text with one value changed."""
    content = {
        "format": 1,
        "devices": [FAST_H200._asdict()],
        "links": [FAST_NVLINK._asdict()],
    }
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        damaged(lambda content: content.update(format=2)),
        damaged(lambda content: content.pop("links")),
        damaged(lambda content: content["devices"][0].update(gflops=-1.0)),
        damaged(lambda content: content["devices"][0].update(gflops=float("nan"))),
        damaged(lambda content: content["devices"][0].update(gflops=float("inf"))),
        damaged(lambda content: content["devices"][0].update(gflops="fast")),
        damaged(lambda content: content["devices"][0].update(gflops=True)),
        damaged(lambda content: content["devices"][0].update(measured="")),
        damaged(lambda content: content["devices"][0].update(packed_gflops=[["tf32"]])),
        damaged(lambda content: content["devices"][0].update(packed_gflops=3)),
        damaged(lambda content: content["links"][0].update(gbps=0)),
        damaged(lambda content: content["links"][0].update(protocol=None)),
    ],
)
def test_a_file_that_does_not_fit_is_ignored_and_written_anew(rates_file, caplog, text):
    rates_file.parent.mkdir()
    rates_file.write_text(text)
    assert store.stored() == Rates()
    assert "is ignored: measure again" in caplog.text
    store.keep(ALL)
    another_process()
    assert store.stored() == ALL


def test_an_undamaged_file_is_not_ignored(rates_file):
    rates_file.parent.mkdir()
    rates_file.write_text(damaged(lambda content: None))
    assert store.stored() == Rates((FAST_H200,), (FAST_NVLINK,))


def test_where_nothing_can_be_written_rates_hold_for_this_process(rates_file, caplog):
    file_cache._unwritable.cache_clear()
    rates_file.parent.write_text("a file in the place of the directory")
    assert store.keep(ALL) is None
    assert "set MULTIMM_CACHE_DIR" in caplog.text
    assert store.stored() == ALL
    another_process()
    assert store.stored() == Rates()


def test_a_user_without_a_owner_keeps_nothing(monkeypatch, caplog):
    monkeypatch.setattr(file_cache, "directory", lambda: None)
    assert store.stored() == Rates()
    assert store.keep(ALL) is None
    assert "set MULTIMM_CACHE_DIR" in caplog.text
    assert store.stored() == ALL


def test_uneven_hosts_are_described_by_the_rate_between_them():
    workers = {
        f"tcp://10.0.0.{host}:{port}": {
            "host": f"10.0.0.{host}", "nthreads": 1, "memory_limit": 2**30
        }
        for host, port in ((1, 1), (1, 2), (2, 1))
    }  # fmt: skip

    class Listed:
        status, asynchronous = "running", True
        cluster = SimpleNamespace(scheduler_info={"workers": workers})

    name = mc.describe(Listed()).slowest.name
    assert mc.describe(Listed()).link == LOCAL_TCP
    way = LinkRates("tcp", name, False, 5.0, 5.0, 1e-4, DAY)
    store.keep(Rates((), (way, way._replace(between=True, gbps=2.0))))
    assert mc.describe(Listed()).link.gbps == 2.0


def test_threads_of_this_process_use_what_was_measured():
    (device,) = mc.local().devices
    store.keep(Rates((DeviceRates(device.name, device.gflops, 77.0, (), DAY),)))
    assert mc.local().slowest.gflops == 77.0
    assert mc.local().link == SHARED_MEMORY


def test_the_spec_of_listed_workers_stays_as_shipped():
    store.keep(ALL)
    gpu = {"name": H200.name, "memory-total": 2**37}
    listed = {"host": "x", "nthreads": 1, "memory_limit": 2**30, "gpu": gpu}
    assert spec_of({"ucxx://x:1": listed}, {}).slowest.gflops == H200.gflops


def run(*args):
    return CliRunner().invoke(main, list(args), prog_name="multimm")


def test_plans_for_gpus_on_paper_use_what_was_measured():
    store.keep(ALL)
    output = run("plan", "65536x65536", "65536x65536", "--gpus", "16", "--per-node", "8").output
    assert f"rates measured {DAY}\n" in output
    given = run("plan", "65536x65536", "65536x65536", "--gpus", "16", "--per-node", "8",
                "--node-link", "50").output  # fmt: skip
    assert "except for transfers between nodes" in given
