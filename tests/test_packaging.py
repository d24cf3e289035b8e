"""Every kernel source is package data; `make wheel-check` proves it on built archives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


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
