"""Ctrl-C, SIGTERM and SIGHUP: never lost, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time

import click
import numpy as np
import pytest
from click.testing import CliRunner
from commands import command
from foreign_files import names

from multimm.cli import Commands, stop
from multimm.cli import run as cli_run
from multimm.cli.stop import STOP, Stopped

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def _signals_that_nobody_ignores():
    """Under nohup pytest, and what it starts, would ignore SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in CODES}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code", "text", "form"),
    [
        (signal.SIGINT, 130, "interrupted", "zarr"),
        (signal.SIGTERM, 143, "stopped by SIGTERM", "npy"),
        (signal.SIGHUP, 129, "stopped by SIGHUP", "zarr"),
    ],
)
def test_a_signal_in_mid_run_leaves_nothing(tmp_path, number, code, text, form):
    size = 8000
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "float32", (size, size))
    process = command(
        *("matmul", tmp_path / "a.npy", tmp_path / "a.npy", "-o", tmp_path / f"c.{form}"),
        *("--workers", 2, "--memory-limit", "1GB"),
    )
    deadline = time.monotonic() + 60
    while len(names(tmp_path)) < 2:  # until the unfinished output is there
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # into the run; 10**12 operations take much longer
    # A terminal, `timeout` and batch systems send it to the workers as well.
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors.strip() == f"multimm: {text}"
    assert names(tmp_path) == ["a.npy"]


def test_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector():
    def interrupted(phase, info):
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)  # handled before the callback returns

    sent, before = [], signal.getsignal(signal.SIGINT)
    gc.callbacks.append(interrupted)
    try:
        with cli_run.interrupts() as check:
            check()
            gc.collect()
            with pytest.raises(KeyboardInterrupt):
                check()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        gc.callbacks.remove(interrupted)
    assert signal.getsignal(signal.SIGINT) is before


def exit_of(command):
    """Exit code and text of a command line with this one command."""
    group = Commands("multimm")
    group.get_command = lambda ctx, name: click.Command(name, callback=command)
    result = CliRunner().invoke(group, ["command"])
    return result.exit_code, result.stderr.strip()


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_a_command_as_an_error_does(number):
    cleaned = []

    def run():
        try:
            signal.raise_signal(number)
            time.sleep(60)
        finally:
            signal.raise_signal(number)  # the same request: it disturbs no cleaning up
            cleaned.append(number)

    assert exit_of(run) == (CODES[number], f"multimm: stopped by {number.name}")
    assert cleaned == [number]
    assert STOP.signal is None


def test_a_later_signal_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(stop, "SAME_SECONDS", 0)
    with STOP.heeded(), pytest.raises(Stopped), STOP.held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGHUP)


def test_a_signal_that_is_held_back_is_raised_at_the_end():
    with STOP.heeded():
        with pytest.raises(Stopped), STOP.held_back():
            signal.raise_signal(signal.SIGTERM)
        assert STOP.signal is signal.SIGTERM


def test_a_run_that_dies_of_the_signal_counts_as_stopped():
    def run():
        with cli_run.failed_run(), cli_run.interrupts():
            signal.raise_signal(signal.SIGTERM)
            raise OSError("the workers got it too")

    assert exit_of(run) == (143, "multimm: stopped by SIGTERM")


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert exit_of(lambda: signal.raise_signal(signal.SIGHUP)) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
