"""`multimm doctor` judged on invented machines, and run on this one."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from click.testing import CliRunner
from rich.console import Console

from multimm.cli.doctor import doctor, report
from multimm.cluster.inspect import host_report as facts_module
from multimm.cluster.inspect.devices import Gpu, install_command
from multimm.cluster.inspect.host_report import Facts, findings, gather, usable

GPUS = tuple(Gpu(str(i), "NVIDIA H200", 150_754_820_096) for i in range(2))
PACKAGES = {
    "numpy": (("numpy", "2.4.6"),),
    "dask": (("dask", "2026.7.1"),),
    "distributed": (("distributed", "2026.7.1"),),
    "cupy": (("cupy-cuda13x", "14.2.0"),),
    "dask-cuda": (("dask-cuda", "26.10.0"),),
    "rmm": (("rmm-cu13", "26.10.0"),),
    "ucxx": (("ucxx-cu13", "0.52.0"),),
    "distributed-ucxx": (("distributed-ucxx-cu13", "0.52.0"),),
    "numba-cuda": (("numba-cuda", "0.30.4"),),
}
GOOD = Facts(
    "3.12.3", "Linux", 32, 256 * 2**30, GPUS, "580.159.04", (13, 0), {(0, 1): 18}, PACKAGES
)
LAPTOP = replace(
    GOOD,
    gpus=(),
    driver=None,
    cuda=None,
    nvlinks={},
    packages={name: PACKAGES[name] for name in ("numpy", "dask", "distributed")},
)


def with_packages(**changes):
    packages = {**PACKAGES, **{name.replace("_", "-"): found for name, found in changes.items()}}
    return replace(GOOD, packages=packages)


def problems(facts):
    return [finding for finding in findings(facts) if finding.level == "problem"]


def test_a_complete_gpu_host_is_usable_and_told_of_open_listeners():
    found = findings(GOOD)
    assert usable(found)
    assert ["all network interfaces, unencrypted" in finding.text for finding in found] == [True]


def test_a_host_without_gpu_is_usable_with_cpu_workers():
    found = findings(LAPTOP)
    assert usable(found)
    assert [finding.text for finding in found] == ["no NVIDIA driver: products run on CPU workers"]
    hidden = findings(replace(LAPTOP, driver="580", cuda=(13, 0)))
    assert "no GPU visible to this process" in hidden[0].text


@pytest.mark.parametrize(
    ("changes", "text", "remedy"),
    [
        (
            {"cupy": (("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.2.0"))},
            "2 builds of CuPy",
            "pip uninstall cupy-cuda12x cupy-cuda13x",
        ),
        ({"cupy": ()}, "not installed: cupy", "multimm[cuda13]"),
        ({"cupy": (("cupy-cuda12x", "14.2.0"),)}, "different CUDA versions", "pip uninstall"),
    ],
)
def test_what_does_not_fit_is_a_problem_with_a_remedy(changes, text, remedy):
    facts = with_packages(**changes)
    assert not usable(findings(facts))
    first = problems(facts)[0]
    assert text in first.text
    assert remedy in first.remedy


def test_builds_for_a_newer_cuda_than_the_drivers_are_a_problem():
    old = replace(GOOD, cuda=(12, 8))
    found = problems(old)
    assert "cupy-cuda13x is for CUDA 13, the driver runs CUDA up to 12.8" in found[0].text
    assert "multimm[cuda12]" in found[0].remedy


def test_builds_for_an_older_cuda_than_the_drivers_are_fine():
    twelve = {
        name: tuple((build.replace("13", "12"), number) for build, number in builds)
        for name, builds in PACKAGES.items()
    }
    assert problems(replace(GOOD, packages=twelve)) == []


def test_packages_that_do_not_fit_each_other_say_so_themselves(monkeypatch):
    asks = {
        "dask-cuda": ["rapids-dask-dependency==26.10.*"],
        "rapids-dask-dependency": ["dask==2026.7.1", "absent>=1"],
        "distributed": ["dask<2026.8,>=2026.7.1", "dask>=2027; extra == 'new'"],
        "distributed-ucxx-cu13": ["ucxx-cu13==0.52.*"],
        "multimm": ["cupy-cuda13x!=14.1.0; extra == 'cuda13'", "dask<0; extra == 'dev'"],
    }
    monkeypatch.setattr(facts_module, "requires", asks.get)
    found = {
        "multimm": "0.1",
        "dask-cuda": "26.10.0", "rapids-dask-dependency": "26.10.0", "dask": "2026.7.1",
        "distributed": "2026.7.1", "distributed-ucxx-cu13": "0.52.0", "cupy-cuda13x": "14.2.0",
        "ucxx-cu13": "0.52.1a3",
    }  # fmt: skip
    assert [*facts_module._asked_in_vain(found)] == []
    for name, number, asker, needed in (
        ("dask", "2026.8.0", "rapids-dask-dependency", "dask==2026.7.1"),
        ("cupy-cuda13x", "14.1.0", "multimm", "cupy-cuda13x!=14.1.0"),
        ("ucxx-cu13", "0.51.0", "distributed-ucxx-cu13", "ucxx-cu13==0.52.*"),
    ):
        unmet = tuple(facts_module._asked_in_vain(found | {name: number}))
        first, *_ = problems(replace(GOOD, unmet=unmet))
        assert first.text == f"{asker} {found[asker]} needs {needed}, found {number}"
        assert first.remedy == f"pip install '{needed}'"


def test_install_command_follows_the_driver():
    assert install_command((12, 4)) == 'pip install "multimm[cuda12]"'
    assert install_command((13, 0)) == install_command(None) == 'pip install "multimm[cuda13]"'


def printed(facts):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report(facts))
    return capture.get()


def test_the_report_shows_gpus_links_and_builds():
    text = printed(GOOD)
    assert "NVIDIA H200, 140.4 GiB" in text
    assert "0-1: 18 links" in text
    assert "13.0" in text
    assert "14.2.0 (cupy-cuda13x)" in text
    assert "through host memory" in printed(replace(GOOD, nvlinks={}))
    assert "NVLink" not in printed(LAPTOP)


@pytest.mark.parametrize(
    ("facts", "code", "expected"),
    [
        (GOOD, 0, "will use 2 GPU worker(s)"),
        (LAPTOP, 0, "will use CPU workers"),
        (with_packages(cupy=()), 1, 'do: pip install "multimm[cuda13]"'),
    ],
)
def test_the_command_prints_findings_and_exits_by_them(monkeypatch, facts, code, expected):
    monkeypatch.setattr(facts_module, "gather", lambda: facts)
    result = CliRunner().invoke(doctor)
    assert result.exit_code == code
    assert expected in result.output
    assert "every user of this host can connect to the scheduler" in result.output
    assert "security=distributed.Security.temporary()" in result.output
    assert "\x1b" not in result.output


def test_names_are_shown_as_they_are_and_order_nothing(monkeypatch):
    named = Gpu("0", "[red]Titan[/] \x1b[31m\x9b2J", 2**34)
    facts = replace(GOOD, gpus=(named,), driver="580\x1b]0;title\x07")
    monkeypatch.setattr(facts_module, "gather", lambda: facts)
    output = CliRunner().invoke(doctor).output
    assert r"[red]Titan[/] \x1b[31m\x9b2J" in output
    assert r"580\x1b]0;title\x07" in output
    assert not set("\x1b\x9b\x07") & set(output)


def test_a_cache_that_is_not_used_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path))
    assert "kept between runs" not in CliRunner().invoke(doctor).output
    tmp_path.chmod(0o777)
    output = CliRunner().invoke(doctor).output
    assert f"not kept between runs: others can write to {tmp_path} (mode 777)" in output


def test_this_machine_is_described():
    facts = gather()
    assert facts.cores >= 1
    assert facts.memory_bytes > 2**28
    assert facts.packages["dask"][0][1] == facts.packages["distributed"][0][1]
    assert (facts.driver is None) == (facts.cuda is None)


class FakeNvml:
    """Three GPUs: 0 and 1 joined directly by two links, 2 by one link to a switch."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 3
    REMOTE: ClassVar = {0: ["b1", "b1"], 1: ["b0", "b0"], 2: ["switch"]}

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        return Pci(f"b{handle}")

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= len(self.REMOTE[handle]):
            raise self.NVMLError
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return Pci(self.REMOTE[handle][link])


class Pci:
    def __init__(self, bus):
        self.busId = bus


def test_links_are_counted_once_per_pair():
    gpus = tuple(Gpu(str(i), "GPU", 1) for i in range(3))
    assert facts_module._nvlinks(FakeNvml(), gpus) == {(0, 1): 2}


def test_a_switch_joins_all_gpus(monkeypatch):
    monkeypatch.setattr(FakeNvml, "REMOTE", {0: ["s", "s", "s"], 1: ["s", "s", "s"]})
    assert facts_module._nvlinks(FakeNvml(), GPUS) == {(0, 1): 3}
