"""What a script without ``if __name__ == "__main__":`` prints when it starts a cluster."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest
from commands import python

import multimm.cluster as mc
from multimm.cluster.main_guard import DAEMONIC, UNGUARDED, VARIABLE
from multimm.errors import ClusterError

SCRIPT = """
import multimm

with multimm.cluster.start(workers=2, memory_limit="1GB"):
    pass
"""


def run(*arguments, **options):
    done = python(*arguments, **options)
    assert done.returncode == 1
    return done.stderr


def test_its_error_is_all_that_is_printed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    said = run("script.py", cwd=tmp_path)
    lines = said.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert said.count("Traceback") == 1
    assert f'File "{tmp_path / "script.py"}", line 4' in lines[1]
    assert lines[-1] == f"multimm.errors.ClusterError: {UNGUARDED}"
    assert len(lines) < 12


def test_one_that_is_read_from_standard_input_cannot_have_worker_processes():
    said = run("-", input=SCRIPT)
    assert said.count("Traceback") == 1
    assert "standard input: worker processes cannot import it; save it as a file" in said


def started():
    try:
        mc.start(gpus=0, workers=1)
    except ClusterError as error:
        return str(error)


def test_a_daemonic_process_says_where_to_start_instead():
    """`multiprocessing.Pool` has such processes, and so do workers under a nanny."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.apply(started)
    assert said == DAEMONIC
    assert "ProcessPoolExecutor" in said


def test_a_process_that_start_has_not_started_gets_the_error(monkeypatch, tmp_path):
    process = SimpleNamespace(_inheriting=True)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    with pytest.raises(ClusterError, match='__name__ == "__main__"'):
        mc.start(gpus=0)
    # What a worker has inherited of a cluster that has started since.
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "unguarded"))
    with pytest.raises(ClusterError, match='__name__ == "__main__"'):
        mc.start(gpus=0)
