"""What commands print of names that would be orders to a terminal, or colours to rich."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from commands import command
from foreign_files import get, names, put
from hypothesis import given
from hypothesis import strategies as st

import multimm
from multimm.cli import main
from multimm.cluster.inspect.cluster_spec import spec_of
from multimm.cluster.inspect.workers import Answer
from multimm.errors import ClusterError, printable
from multimm.planning.spec import DeviceSpec, MatrixSpec

#: Sets colours, clears the screen, names the window; one with 8-bit controls; one for rich.
ORDERS = "\x1b[31m\x1b[2J\x1b]0;x\x07\x9b31m[red]"
SHOWN = r"\x1b[31m\x1b[2J\x1b]0;x\x07\x9b31m[red]"


def assert_harmless(text):
    assert all(line.isprintable() for line in text.split("\n")), repr(text)


def run(*args):
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    for text in (result.stdout, result.stderr):
        assert_harmless(text)
    return result


@pytest.mark.slow
@given(st.text() | st.text(st.characters(categories=["Cc", "Cs", "Cf", "Zl", "Zp"])))
def test_text_is_shown_in_one_line_that_a_terminal_can_take(text):
    shown = printable(text)
    assert not set(shown) & set("\x1b\x9b\n\r\t\x7f\x00\u2028\u202e\u2066")
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize("name", [f"{ORDERS}.npy", f"{ORDERS}.zarr", f"{ORDERS}.h5", ORDERS])
@pytest.mark.parametrize("more", [(), ("--debug",)])
def test_a_missing_file_is_named(name, more):
    for args in (("plan", name, "3x3"), ("matmul", name, name, "-o", "c.npy")):
        result = run(*args, *more)
        assert result.exit_code == 2
        assert SHOWN in result.stderr
        assert more or result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "3x3", "3x3", f"--{ORDERS}"),
        ("plan", "3x3", "3x3", "--blocks", ORDERS),
        ("plan", "3x3", "3x3", "--precision", ORDERS),
        (ORDERS,),
        ("matmul", "a.npy", "b.npy", "--scheduler", ORDERS, "-o", "c.npy"),
        ("matmul", "a.npy", "b.npy", "--memory-limit", ORDERS, "-o", "c.npy"),
        ("tune", "--memory-limit", ORDERS),
    ],
    ids=lambda args: args[0],
)
def test_options_are_repeated_harmlessly(tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a.npy", np.ones((2, 2)))
    put(tmp_path / "b.npy", np.ones((2, 2)))
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_product_of_files_with_such_names(tmp_path):
    files = [tmp_path / f"{name}{ORDERS}.npy" for name in "abc"]
    put(files[0], np.eye(3, dtype=np.float32))
    put(files[1], np.ones((3, 2), np.float32))
    done = command("matmul", *files[:2], "-o", files[2], "--workers", 1, "--memory-limit", "500MB")
    output, errors = done.communicate(timeout=100)
    assert done.returncode == 0, errors
    assert f"c{SHOWN}.npy" in output
    assert_harmless(output)
    assert_harmless(errors)
    np.testing.assert_array_equal(get(files[2]), np.ones((3, 2)))
    assert names(tmp_path) == sorted(file.name for file in files)


def fails(*_, **__):
    """Says what it can in all ways, and then fails."""
    warnings.warn(f"a warning {ORDERS}", stacklevel=1)
    logging.getLogger("anybody").warning("a log of %s", ORDERS)
    raise ClusterError(f"worker {ORDERS} died") from ValueError(ORDERS)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("more", [(), ("--debug",)])
def test_errors_warnings_and_logs_of_anybody(tmp_path, monkeypatch, more):
    monkeypatch.setattr(multimm.cluster, "start", fails)
    # As in a process of its own: pytest has handlers.
    monkeypatch.setattr(logging.getLogger("anybody"), "propagate", False)
    path = put(tmp_path / "a.npy", np.ones((2, 2)))
    result = run("matmul", path, path, "-o", tmp_path / "c.npy", *more)
    assert result.exit_code == 2
    for text in ("a warning", "a log of", "worker"):
        assert f"{text} {SHOWN}" in result.stderr


def test_the_environment_is_repeated_harmlessly(tmp_path, monkeypatch):
    folder = tmp_path / ORDERS
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(folder))
    done = command("plan", "100x100", "100x100", "--workers", 1)
    output, errors = done.communicate(timeout=100)
    assert done.returncode == 0, errors
    assert errors.startswith("multimm: warning: the cache is not used")  # as warnings are shown
    assert errors.count("\n") == 1
    assert f"others can write to {tmp_path}/{SHOWN}" in errors
    assert_harmless(output + errors)


@pytest.mark.slow
def test_streams_that_were_closed_go_nowhere(tmp_path):
    """A file would be opened in their place, and what anybody writes to stderr go into it."""
    matrix = np.eye(3)
    np.save(tmp_path / "a.npy", matrix)
    words = f"{sys.executable} -m multimm matmul a.npy a.npy -o c.npy --workers 1 <&- >&- 2>&-"
    for expected in (0, 2):  # the second time c.npy is there already
        assert subprocess.run(words, shell=True, cwd=tmp_path).returncode == expected
        np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), matrix)


def test_devices_of_other_hosts_are_named_harmlessly():
    worker = {"host": "a", "nthreads": 1, "memory_limit": 2**30}
    device = DeviceSpec(ORDERS, "gpu", 2**30, 1.0, 1.0)
    told = {"tcp://a:1": Answer(device, 1, 2**30)}
    reported = {"ucxx://a:1": {**worker, "gpu": {"name": ORDERS, "memory-total": 2**30}}}
    side = MatrixSpec((99, 99))
    for spec in (spec_of({"tcp://a:1": worker}, told), spec_of(reported, {})):
        plan = multimm.plan(side, side, cluster=spec)
        assert SHOWN in str(plan)
        assert_harmless(str(plan))
