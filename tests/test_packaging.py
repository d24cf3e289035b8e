"""What is installed: kernels, extras, versions, environments; `make wheel-check` builds it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import multimm

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLASSIFIERS = PROJECT["project"]["classifiers"]
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_the_link_to_the_kernels_is_relative():
    # An absolute link would work on the machine that made it, and nowhere else.
    link = ROOT / "multimm" / "gpu" / "cuda"
    assert link.is_symlink()
    assert link.readlink() == Path("../../kernels")


def test_the_package_data_covers_every_kernel_source():
    package = ROOT / "multimm" / "gpu"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["multimm.gpu"]
    shipped = {path.resolve() for pattern in patterns for path in package.glob(pattern)}
    sources = {path for path in (ROOT / "kernels").rglob("*.cu*") if path.is_file()}
    assert sources
    assert sources <= shipped


def test_the_cuda_extras_pin_the_same_releases():
    extras = PROJECT["project"]["optional-dependencies"]
    twelve, thirteen = (
        [re.sub(r"(cu|cuda)1[23]", r"\g<1>1X", requirement) for requirement in extras[name]]
        for name in ("cuda12", "cuda13")
    )
    assert twelve == thirteen
    assert "dask==2026.7.1" in twelve
    assert "distributed==2026.7.1" in twelve


def test_python_versions_are_those_of_the_classifiers():
    prefix = "Programming Language :: Python :: 3."
    minors = [int(x.removeprefix(prefix)) for x in CLASSIFIERS if x.startswith(prefix)]
    assert PROJECT["project"]["requires-python"] == f">=3.{min(minors)}"
    assert minors == [11, 12, 13, 14]
    supported = (ROOT / "docs" / "supported.md").read_text("utf-8")
    assert [f"3.{x}" for x in minors] == re.findall(r"^\| Python (3\.\d+) \|", supported, re.M)


# Versions


def test_the_newest_version_of_the_changelog_is_this_one():
    found = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert found[0] == multimm.__version__
    assert found == sorted(found, key=lambda x: [*map(int, x.split("."))], reverse=True)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", multimm.__version__)
    for name in ("authors", "license"):
        assert citation[name] == PROJECT["project"][name]


# Environments and images


def extras(text: str) -> set[str]:
    """The extras of this project that a text installs."""
    lists = re.findall(r'(?:\.|\.whl\)"?)\[([\w,${}]+)\]', text)
    return {name for found in lists for name in found.split(",")}


def test_the_conda_environment_installs_extras_that_there_are():
    found = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    assert set(found) == {"name", "channels", "dependencies"}
    *names, pip = found["dependencies"]
    assert names[-1] == "pip"
    (python,) = (name.split("=")[1] for name in names if name.startswith("python="))
    assert f"Programming Language :: Python :: {python}" in CLASSIFIERS
    (line,) = pip["pip"]
    assert line.startswith("-e .")
    assert extras(line) == {"demo", "bench"} <= EXTRAS.keys()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docker").glob("*Dockerfile")), ids=lambda x: x.name
)
def test_an_image_is_made_of_what_there_is(path):
    """No daemon builds it here: what it copies, installs and runs exists."""
    text = re.sub(r"\\\n", "", path.read_text("utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert {step for step, _ in steps} <= {"FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR", "CMD"}
    for image in (rest for step, rest in steps if step == "FROM"):
        python = re.fullmatch(r"python:(3\.\d+)-slim( AS build)?", image)[1]
        assert f"Programming Language :: Python :: {python}" in CLASSIFIERS
    left_out = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = [rest.split() for step, rest in steps if step == "COPY"]
    for source, _ in (words for words in copied if not words[0].startswith("--from=")):
        assert (ROOT / source).exists()
        assert source not in left_out
    default = dict(rest.split("=") for step, rest in steps if step == "ARG")
    used = {default.get(name.strip("${}"), name) for name in extras(text)}
    assert {"demo", "bench"} <= used <= EXTRAS.keys()
    (command,) = (json.loads(rest) for step, rest in steps if step == "CMD")
    assert command[0] in PROJECT["project"]["scripts"]
    assert f"-f docker/{path.name} " in text


def test_an_image_lacks_nothing_that_a_wheel_is_made_of():
    left_out = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    needed = ("multimm", "multimm_benchmarks", "kernels", "cluster", "README.md", "LICENSE")
    assert not {*needed, "pyproject.toml"} & {*left_out}
    assert all((ROOT / name).exists() for name in needed)
