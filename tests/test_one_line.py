"""Whatever a command dies of, stderr has one line, which says what happened, why and what to do."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from commands import command, python
from foreign_files import names

#: Modules that Dask loads in each worker process, where they are named as preloads.
HOG = """
    import time

    from distributed.diagnostics.plugin import WorkerPlugin

    class Hog(WorkerPlugin):
        def transition(self, key, start, finish, **more):
            if finish == "executing" and "multimm-" in str(key):
                self.held = bytearray(b"x") * 350_000_000
                time.sleep(60)  # the result goes nowhere

    def dask_setup(worker):
        worker.plugins["hog"] = Hog()
"""
ONCE = """
    import os, pathlib, threading, time

    once = pathlib.Path(__file__).with_suffix(".once")
    if once.exists():
        raise ImportError("libnothing.so")

    def dask_setup(worker):
        def end():
            while not worker.state.executing:
                time.sleep(0.01)
            once.touch()
            os._exit(3)

        threading.Thread(target=end, daemon=True).start()
"""
SCHEDULER = """
    from distributed import LocalCluster

    with LocalCluster(1, processes=False, protocol="tcp", dashboard_address=":0") as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""
NOISY = """
    import atexit, os, sys
    import click
    from multimm.cli import Commands
    from multimm.cli.options import DEBUG
    from multimm.errors import ClusterError

    @click.command()
    @click.argument("end")
    @DEBUG
    def noisy(end):
        atexit.register(os.write, 2, b"last words\\n")
        os.write(2, b"from C \\x1b[31m\\n")
        print("from Python", file=sys.stderr)
        if end == "badly":
            raise ClusterError("all is lost")

    group = Commands("multimm")
    group.get_command = lambda context, name: noisy
    group.main()
"""


def preload(tmp_path, monkeypatch, source):
    """Have workers of commands load a module with this text."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "preloaded.py").write_text(textwrap.dedent(source))
    path = os.pathsep.join([str(tmp_path / "lib"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__PRELOAD", '["preloaded"]')


def product(folder, *options, size=500, **more):
    """``multimm matmul`` of a file with itself."""
    a = folder / "a.npy"
    np.lib.format.open_memmap(a, "w+", "float32", (size, size))
    return command("matmul", a, a, "-o", folder / "c.npy", *options, **more)


def end_of(process, code):
    """What the one line says of a command that ends with this code."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert errors.count("\n") == 1, errors
    assert errors.startswith("multimm: error: ")
    return errors


@pytest.mark.slow
def test_workers_that_are_killed_for_their_memory(tmp_path, monkeypatch):
    preload(tmp_path, monkeypatch, HOG)
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    line = end_of(product(tmp_path, "--workers", 1, "--memory-limit", "300MB"), 1)
    assert "worker died while running it" in line
    assert re.search(r"ended .* held \d+ MB", line)
    assert "(--memory-limit, --threads, --workers, --blocks)" in line
    assert "the plan foresaw" in line
    assert names(tmp_path) == ["a.npy", "lib"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('libnothing.so')", "ImportError: libnothing.so"),
        pytest.param(
            "import os; os._exit(3)",
            "Nanny failed to start worker process",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_that_do_not_start(tmp_path, monkeypatch, source, why):
    preload(tmp_path, monkeypatch, source)
    line = end_of(product(tmp_path, "--workers", 1), 2)
    assert f"did not start (RuntimeError: {why})" in line or f"did not start ({why})" in line
    assert "with --debug" in line
    assert "script" not in line


def test_the_first_cause_of_workers_that_do_not_start_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "thread")
    line = end_of(product(tmp_path, "--workers", 1), 2)
    assert "did not start (ValueError: cannot find context for 'thread')" in line


def test_workers_for_which_too_few_files_may_be_open(tmp_path):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    line = end_of(product(tmp_path, "--workers", 2, preexec_fn=few), 2)
    assert re.search(r"may have 40 files open, and needs (4[1-9]|5\d) for workers=2: ", line)
    assert "`ulimit -n 1024`, or ask for fewer workers" in line
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.slow
def test_workers_that_do_not_start_again(tmp_path, monkeypatch):
    preload(tmp_path, monkeypatch, ONCE)
    line = end_of(product(tmp_path, "--workers", 1), 1)
    assert "all workers died, and none could be started again" in line
    assert names(tmp_path) == ["a.npy", "lib"]


def test_a_scheduler_that_dies(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCHEDULER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as scheduler:
        address = scheduler.stdout.readline().strip()
        process = product(tmp_path, "--scheduler", address, size=8000)
        wait_until(process, lambda: len(names(tmp_path)) > 1)
        time.sleep(0.3)  # into the run; 10**12 operations take much longer
        scheduler.kill()
        line = end_of(process, 1)
    assert f"the connection to the scheduler at {address} is lost" in line
    assert names(tmp_path) == ["a.npy"]


def wait_until(process, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_while_workers_start(tmp_path):
    # A job in the background of a shell ignores it, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = product(tmp_path, "--workers", 2, size=8000)  # not over before the signal
    signal.signal(signal.SIGINT, before)
    wait_until(process, lambda: len(psutil.Process(process.pid).children()) > 1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "multimm: interrupted\n")
    assert names(tmp_path) == ["a.npy"]


def test_nobody_reads_what_a_command_prints():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        process = command("plan", "--help", stdout=nobody)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.slow
def test_nobody_reads_on_what_a_run_prints(tmp_path):
    reader, writer = os.pipe()
    with open(reader) as head, open(writer, "w") as run:
        process = product(tmp_path, "--workers", 1, stdout=run)
        run.close()
        assert head.readline()  # of the plan
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full disk to offer")
def test_a_full_disk_takes_no_output():
    with open("/dev/full", "w") as full:
        line = end_of(command("doctor", stdout=full), 1)
    assert "stdout takes no more (No space left on device): free space" in line


@pytest.mark.parametrize(
    ("args", "code", "errors"),
    [
        (["well"], 0, "from C \\x1b[31m\nfrom Python\nlast words\n"),
        (["badly"], 2, "multimm: error: all is lost\n"),
        (["well", "--debug"], 0, "from C \x1b[31m\nfrom Python\nlast words\n"),
    ],
)
def test_what_libraries_write_is_shown_unless_a_command_fails(args, code, errors):
    done = noisy(*args)
    assert (done.returncode, done.stderr) == (code, errors)


def test_debug_shows_everything_of_a_failure():
    done = noisy("badly", "--debug")
    for text in ("from C", "from Python\nTraceback", "multimm: error: all is lost", "last words"):
        assert text in done.stderr


def noisy(*args):
    return python("-c", textwrap.dedent(NOISY), "noisy", *args)
