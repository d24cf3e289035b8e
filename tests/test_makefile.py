"""The commands of the Makefile: what runs for which variables."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words: str) -> list[str]:
    """The lines that make prints, given nothing of a make that runs these tests."""
    ours = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTEST_ARGS", "PYTHON", "VENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        ["make", *words], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_what_was_asked_for_runs_and_nothing_else(target):
    asked = "tests/test_io.py -k 'zarr or npy'"
    assert make("-n", target, "PYTHON=py", f"PYTEST_ARGS={asked}") == [f"py -m pytest {asked}"]


def test_without_a_wish_lint_comes_first():
    lines = make("-n", "test", "PYTHON=py")
    assert lines[:4] == [
        "py -m ruff check", "py -m ruff format --check", "py -m mypy", "py -m codespell_lib",
    ]  # fmt: skip
    assert any("not slow" in line for line in lines)
    assert not any("not slow" in line for line in make("-n", "test-all", "PYTHON=py"))


def test_the_demo_shows_what_it_installs(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    said, install, _, demo = make("-n", "demo", f"VENV={tmp_path}")
    assert f"Installing into {tmp_path}" in said
    assert "pip install --editable" in install
    assert "--quiet" not in install
    assert demo == f"{tmp_path}/bin/python -m multimm demo"
