"""Worker processes that begin before their cluster: who takes them, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import dask
import pytest
from clusters import soon
from commands import python, runs
from distributed import config  # noqa: F401 - has Dask know its defaults
from distributed.utils import get_mp_context

import multimm.cluster as mc
from multimm.cluster import processes_ahead as ahead
from multimm.cluster.options import choose
from multimm.errors import ClusterError, OptionError

GIB = 2**30
start_module = sys.modules["multimm.cluster.start"]


def begun() -> list[int]:
    return [waiting.pid for waiting in ahead._waiting]


def is_there(pid: int) -> bool:
    """Also one that has ended, and that nobody has waited for."""
    return os.path.exists(f"/proc/{pid}")


def children() -> set[int]:
    """Of this process, but for multiprocessing's tracker."""
    command = ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {int(x.split()[0]) for x in listed if "resource_tracker" not in x and "ps -" not in x}


def pids(client) -> list[int]:
    return sorted(client.run(os.getpid).values())


@pytest.fixture(autouse=True)
def nothing_left():
    before = children()
    yield
    assert not ahead._waiting
    soon(lambda: children() <= before)


def test_a_program_that_compares_no_bytes_with_strings():
    """multiprocessing gives the interpreter's name as bytes."""
    begins = "from multimm.cluster.processes_ahead import _begin; _begin([], []).end()"
    ended = python("-bb", "-c", begins)
    assert ended.returncode == 0, ended.stderr


def test_workers_run_in_them_with_what_this_process_has_by_then(monkeypatch):
    with start_module.workers_ahead(choose(workers=2)):
        waiting = begun()
        monkeypatch.setenv("MULTIMM_TEST_LATER", "here")
        monkeypatch.setattr(sys, "path", [*sys.path, "/multimm/later"])
        with mc.start(workers=2, memory_limit=GIB) as client:
            assert pids(client) == sorted(waiting)
            assert not begun()
            assert set(client.run(os.environ.get, "MULTIMM_TEST_LATER").values()) == {"here"}
            assert all("/multimm/later" in path for path in client.run(lambda: sys.path).values())
            assert client.submit(lambda: 41 + 1).result() == 42


def test_workers_do_not_keep_what_libraries_have_open(tmp_path):
    """As UCX's listeners, which are not closed in new processes by themselves."""
    with open(tmp_path / "port", "w") as kept:
        os.set_inheritable(kept.fileno(), True)
        with mc.start(workers=1, memory_limit=GIB) as client:
            (found,) = client.run(open_files).values()
    assert "socket" in found
    assert kept.name not in found


def open_files() -> str:
    return " ".join(os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))


def test_a_worker_that_is_killed_gets_a_new_process_that_works():
    with mc.start(workers=1, memory_limit=GIB) as client:
        (first,) = pids(client)
        os.kill(first, signal.SIGKILL)
        soon(lambda: client.cluster.workers[0].pid not in (None, first))
        assert client.submit(lambda: 41 + 1).result() == 42
        client.restart()
        assert client.submit(lambda: 41 + 1).result() == 42
        soon(lambda: not is_there(first))


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"])
def test_where_the_environment_is_another_by_then_processes_are_new(monkeypatch, name):
    with start_module.workers_ahead(choose(workers=1)):
        waiting = begun()
        monkeypatch.setenv(name, "3")
        with mc.start(workers=1, memory_limit=GIB) as client:
            assert set(client.run(os.environ.get, name).values()) == {"3"}
            assert pids(client) != waiting
            assert not any(map(is_there, waiting))


def test_where_one_has_ended_its_nanny_gets_a_new_one():
    with start_module.workers_ahead(choose(workers=1)):
        (waiting,) = begun()
        os.kill(waiting, signal.SIGKILL)
        with mc.start(workers=1, memory_limit=GIB) as client:
            assert pids(client) != [waiting]


def test_what_nobody_takes_is_ended():
    with ahead.processes_ahead(2, ["json"], ["csv"]):
        waiting = begun()
        assert len(waiting) == 2
        with ahead.processes_ahead(3, ["json"], []):
            assert begun()[:2] == waiting
            assert len(begun()) == 3
        assert begun() == waiting
    assert not any(map(is_there, waiting))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_they_are_ended_where_a_start_ends_half_way(monkeypatch, error):
    def fails(*_):
        seen.extend(begun())
        raise error

    seen: list[int] = []
    monkeypatch.setattr(start_module, "_cpu_cluster", fails)
    with pytest.raises((error, ClusterError)):
        mc.start(workers=2, memory_limit=GIB)
    assert seen
    assert not any(map(is_there, seen))


def test_a_start_that_is_refused_leaves_none(monkeypatch):
    seen = []
    begin = ahead._begin

    def noted(*modules):
        seen.append(begin(*modules))
        return seen[-1]

    monkeypatch.setattr(ahead, "_begin", noted)
    with pytest.raises(OptionError, match="1MB"):
        mc.start(workers=2, memory_limit="1MB")
    assert seen
    assert not any(is_there(waiting.pid) for waiting in seen)


def test_they_end_with_who_has_begun_them():
    """Killed, so that it cannot end them itself."""
    program = (
        "import os, signal\n"
        "from multimm.cluster import processes_ahead as ahead\n"
        "with ahead.processes_ahead(1, ['json'], []):\n"
        "    print(ahead._waiting[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = python("-c", program)
    assert run.returncode == -signal.SIGKILL
    soon(lambda: not runs(int(run.stdout)))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_whoever_wants_another_method_gets_that(method):
    with dask.config.set({ahead.METHOD: method}), ahead.processes_ahead(1, [], []):
        assert not begun()
        with ahead.given_to_nannies():
            assert sys.modules["distributed.process"].get_mp_context() is get_mp_context()


def test_where_no_process_can_be_begun_nannies_start_them(monkeypatch, caplog):
    caplog.set_level("INFO", ahead.__name__)
    monkeypatch.delattr(os, "posix_spawn")
    with mc.start(workers=1, memory_limit=GIB) as client:
        assert client.submit(lambda: 41 + 1).result() == 42
    assert "no worker process begins ahead: AttributeError" in caplog.text


def test_nannies_have_these_in_the_environment():
    """Others would make each worker's process a new one, and nobody would notice."""
    theirs = dask.config.get(ahead.ENVIRONMENT)
    assert theirs | {"PYTHONHASHSEED": 6640} == ahead.DEFAULTS
    assert dask.config.get(ahead.METHOD) == "spawn"
