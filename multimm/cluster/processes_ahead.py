"""Worker processes that begin before the cluster that they are for.

A worker's process imports for a second or two before it can do anything. So does the process that
starts a cluster, and then it starts a scheduler and its transport, before it asks for workers. Here
processes begin as soon as it is known how many there will be: they import, and wait. When a nanny
of Dask's starts its worker, it is given one of them.

They are as new as those of multiprocessing's "spawn": nothing is forked. What such a process takes
from its parent as it begins, it takes when it is given away: its work, open files, the environment
and `sys.path`. What is read from the environment at the very beginning, such as by NumPy's BLAS, it
has as nannies set it; where they ask for anything else by then, they get a new process.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import popen_fork, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from multimm.cluster import imports_ahead

logger = logging.getLogger(__name__)

#: How nannies start processes, and what they have in the environment of each: where Dask's
#: configuration has it, and what it is by default. (distributed, whose defaults they are, takes
#: most of a second to import.)
METHOD = "distributed.worker.multiprocessing-method"
ENVIRONMENT = "distributed.nanny.pre-spawn-environ"
DEFAULTS = {
    "MALLOC_TRIM_THRESHOLD_": 65536,
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "PYTHONHASHSEED": 6640,
}
#: Open files that a process can be given; a worker takes 6.
MOST_FILES = 64


class Waiting(NamedTuple):
    """A process that imports, or has done so and waits."""

    pid: int
    link: socket.socket  #: its work comes through it; it ends where that is closed before
    early: dict[str, str]  #: of its environment, what cannot be changed any more

    def end(self) -> None:
        """End it."""
        self.link.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


#: Those that nobody was given yet.
_waiting: list[Waiting] = []


@contextmanager
def processes_ahead(count: int, first: Sequence[str], later: Sequence[str]) -> Iterator[None]:
    """Begin processes until so many wait, and end those of them that nobody has taken at the end.

    Where none can be begun, nannies start processes as ever.

    Parameters
    ----------
    count : int
    first, later : sequence of str
        Modules to import: what a process needs to understand its work; and what may be imported
        by a thread while it works. See `imports_ahead`.
    """
    import dask

    begun: list[Waiting] = []
    try:
        try:
            while dask.config.get(METHOD, "spawn") == "spawn" and len(_waiting) < count:
                begun.append(_begin(first, later))
                _waiting.append(begun[-1])
        except (OSError, AttributeError, ValueError) as error:
            logger.info("no worker process begins ahead: %r", error)
        yield
    finally:
        for one in begun:
            with suppress(ValueError):  # it was taken
                _waiting.remove(one)
                one.end()


def _begin(first: Sequence[str], later: Sequence[str]) -> Waiting:
    import dask

    given = DEFAULTS | dask.config.get(ENVIRONMENT, {})
    # As nannies do: what somebody has set in the environment stays.
    early = {k: os.environ.get(k, str(value)) for k, value in given.items() if value is not None}
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        command = spawn.get_command_line()
        asked = json.dumps([sys.path, theirs.fileno(), first, later])
        command[command.index("-c", 1) + 1] = _PROGRAM.format(asked=asked)
        pid = os.posix_spawn(command[0], command, os.environ | early)
    return Waiting(pid, ours, early)


#: The same modules as in this process, and not the script that it runs.
_PROGRAM = """\
import json, sys
sys.path[:], *asked = json.loads({asked!r})
from multimm.cluster.processes_ahead import wait_for_work
wait_for_work(*asked)
"""


@contextmanager
def given_to_nannies() -> Iterator[None]:
    """Nannies that start workers inside take processes that wait, while there are some."""
    import distributed.process
    from distributed.utils import get_mp_context

    process: Any = distributed.process
    process.get_mp_context = lambda: _Context() if _waiting else get_mp_context()
    try:
        yield
    finally:
        process.get_mp_context = get_mp_context


class _Process(SpawnProcess):
    """Runs in a process that waits for work, or in a new one."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        while _waiting:
            taken = _waiting.pop(0)
            try:
                return _Given(process_obj, taken)
            except OSError as error:
                logger.info("a process that waited for work is replaced: %r", error)
                taken.end()
        return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    """What `distributed.process` asks for its pipes and processes."""

    Process = _Process


class _File:
    """An open file, by its number among those that the process was given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        """Its descriptor: asked for in that process, as the object is unpickled that has it."""
        return _files[self.number]


#: In a process that was given work: the files that came with it.
_files: list[int] = []


class _Given(popen_fork.Popen):
    """Gives a process that waits its work; as multiprocessing's own classes of this name do."""

    method = "spawn"
    DupFd = _File

    def __init__(self, process_obj: Any, taken: Waiting) -> None:
        self._sent: list[int] = []
        self._taken = taken
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Have a file sent; its number."""
        self._sent.append(fd)
        return len(self._sent) - 1

    def _launch(self, process_obj: Any) -> None:
        if any(os.environ.get(name) != value for name, value in self._taken.early.items()):
            raise OSError("the environment that it has begun with is another")
        with TemporaryFile() as work:
            pickle.dump(dict(os.environ), work)
            set_spawning_popen(self)  # type: ignore[arg-type]
            try:
                reduction.dump(spawn.get_preparation_data(process_obj._name), work)
                reduction.dump(process_obj, work)
            finally:
                set_spawning_popen(None)
            work.seek(0)
            tracker: Any = resource_tracker.getfd()
            sent = [work.fileno(), tracker, *self._sent]
            if len(sent) > MOST_FILES:
                raise OSError(f"{len(sent)} open files are to be given to it")
            socket.send_fds(self._taken.link, [b"."], sent)
        self.pid = self._taken.pid
        self.sentinel = self._taken.link.detach()
        self.finalizer = util.Finalize(self, os.close, [self.sentinel])


def _close_others(link: int) -> None:
    """Close what libraries in C, UCX for one, have left open for processes to inherit.

    As a process that multiprocessing begins does: ports would stay taken as long as workers run.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != link:
            with suppress(OSError):  # it was open for this list alone
                os.close(number)


def wait_for_work(link: int, first: Sequence[str], later: Sequence[str]) -> None:
    """The program of a process: import, wait, and do what it is given, in its main thread."""
    import gc

    _close_others(link)
    gc.disable()  # a fifth of what imports take
    try:
        os.set_inheritable(link, False)
        imports_ahead.load(first)
        imports_ahead.begin(later, driver=False)
        with socket.socket(fileno=link) as parent:
            _, files, *_ = socket.recv_fds(parent, 1, MOST_FILES)
            parent.detach()
    except BaseException:  # Ctrl-C, say: who starts this process is told as well
        os._exit(1)
    if not files:  # nobody wants it
        os._exit(0)
    gc.enable()
    work, tracker, *_files[:] = files
    with open(work, "rb", buffering=0, closefd=False) as file:  # reads no more than it takes
        environment = pickle.load(file)
    os.environ.clear()
    os.environ.update(environment)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    sys.exit(spawn._main(work, link))
