"""`multimm doctor` judged on invented machines, and run on this one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from multimm.cli.doctor import doctor
from multimm.cluster.inspect import host_report as facts_module
from multimm.cluster.inspect.devices import Gpu
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
