"""A process group that measures one system: started, listened to, and taken down, all of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from multimm_benchmarks.limit import Limit
from multimm_benchmarks.records import ROOT

Message = dict[str, Any]
COMMAND = (sys.executable, "-m", "multimm_benchmarks.peers")
#: Seconds that a group has to end by itself once it has said everything.
GRACE = 30.0
#: Seconds that its processes have to end when asked, before they are killed.
SETTLE = 5.0
_OVER: Message = {}


class GroupError(Exception):
    """A group that ended, or fell silent, before it had said everything."""


class OutOfTimeError(Exception):
    """The sweep's time was up before a group had said everything."""


class Group:
    """`python -m multimm_benchmarks.peers` with one job; a context manager.

    Parameters
    ----------
    log : Path
        Where its stderr goes.
    devices : str, optional
        CUDA_VISIBLE_DEVICES of the group; by default as it is here.
    ahead : sequence of str
        Systems whose modules it imports before it has a job.
    silence : float
        Seconds without a message after which the group is given up.
    """

    def __init__(
        self,
        log: Path,
        devices: str | None = None,
        ahead: Sequence[str] = (),
        silence: float = 900.0,
    ) -> None:
        self._log, self._devices, self._ahead, self._silence = log, devices, ahead, silence
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._messages: queue.Queue[Message] = queue.Queue()

    def __enter__(self) -> Group:
        """Begin the process; one that has begun goes on."""
        if self._process is not None:
            return self
        environment = dict(os.environ)
        paths = [str(ROOT or ""), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self._devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, *self._ahead], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()
        return self

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            with suppress(ValueError):  # half a line, of a process that was killed
                self._messages.put(json.loads(line))
        self._messages.put(_OVER)

    def messages(self, job: str, limit: Limit | None = None) -> Iterator[Message]:
        """Yield what the group says to a job until it ends.

        Parameters
        ----------
        job : str
            One line; see `multimm_benchmarks.peers.__main__`.
        limit : Limit, optional
            Of the sweep. When it is up, nothing more is waited for.

        Raises
        ------
        GroupError
            If it ends with an error, or says nothing for too long.
        OutOfTimeError
            If the sweep's time is up; what was said until then has been yielded.
        """
        assert self._process is not None
        limit = limit or Limit()
        with suppress(BrokenPipeError):  # it died at once: its messages end, and say so
            print(job, file=self._process.stdin, flush=True)
        while True:
            try:
                message = self._messages.get(timeout=min(self._silence, limit.left))
            except queue.Empty:
                if not limit.left:
                    raise OutOfTimeError from None
                raise GroupError(f"no answer for {self._silence:.0f} s") from None
            if message is _OVER:
                break
            yield message
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(min(GRACE, limit.left))
        if self._process.returncode:
            raise GroupError(self._last_words(self._process.returncode))

    def _last_words(self, status: int) -> str:
        """The exit status and the last line of the log, which mostly is an exception's."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line]
        return f"its process ended with {how}" + (f": {lines[-1][:300]}" if lines else "")

    def __exit__(self, *_: object) -> None:
        """End every process of the group, whatever state it is in."""
        if self._process is None or self._ended:
            return
        self._ended = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if number == signal.SIGTERM:
                self._settle(self._process)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _settle(self, process: subprocess.Popen[str]) -> None:
        """Wait until the group's processes are gone, for a while."""
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline:
            process.poll()
            if not any(_alive(number, process.pid) for number in psutil.pids()):
                return
            time.sleep(0.05)


def _alive(number: int, group: int) -> bool:
    """Whether a process is of a group, and runs.

    Those that have ended and wait for an init process that takes its time, or never asks, do
    not: with them each end of a group took 1.5 s on one machine, and all of SETTLE elsewhere.
    """
    try:
        mine = os.getpgid(number) == group
        return mine and psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False
