"""`multimm doctor` judged on invented machines, and run on this one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from multimm import errors
from multimm.cli.doctor import doctor
from multimm.cluster.inspect import host_report as facts_module
from multimm.cluster.inspect.devices import Gpu
from multimm.cluster.inspect.host_report import Facts, findings, gather, usable

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize("changes", [{}, {"ucxx": (), "distributed_ucxx": ()}])
def test_a_complete_gpu_host_is_usable_also_without_ucxx(changes):
    assert findings(with_packages(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "text", "remedy"),
    [
        (
            {"cupy": (("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.2.0"))},
            "2 builds of CuPy",
            "pip uninstall cupy-cuda12x cupy-cuda13x",
        ),
        ({"cupy": ()}, "not installed: cupy", f"{ROOT}[cuda13]"),
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
        (with_packages(cupy=()), 1, f"do: pip install -e '{ROOT}[cuda13]'"),
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


# Another project with our import name


def installed(folder, name, version, files):
    """A distribution of these files, which are empty."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return info


OURS = ("multimm/__init__.py", "multimm/api.py", "multimm_benchmarks/cases.py")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages with an installation of ours."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed(tmp_path, "dask-multimm", "0.2.0", OURS)
    return tmp_path


def test_an_installation_of_ours_alone_is_in_order(site):
    assert gather().same_name == ()


def test_a_distribution_of_another_project_is_named(site):
    installed(site, "MultiMM", "2.0.2", ["multimm/bridge.py"])
    (said,) = gather().same_name
    assert said.startswith("MultiMM 2.0.2 is installed, which has the import name multimm, too")


def test_the_command_says_what_to_do_about_another_project(monkeypatch):
    facts = replace(LAPTOP, same_name=("MultiMM 2.0.2 is installed",))
    monkeypatch.setattr(facts_module, "gather", lambda: facts)
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 1
    assert "problem: MultiMM 2.0.2 is installed" in result.output
    assert f"do: pip uninstall multimm dask-multimm; pip install -e {ROOT}\n" in result.output


# What to type to install this project


def test_what_to_install_of_an_installation_is_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "multimm" / "errors.py"))
    assert errors.how_to_install("io") == "pip install '.[io]' in a checkout of multimm"
