"""NumPy blocks between processes of one host: who needs a block copies it from where it lies.

Over TCP a block goes through the kernel's buffers in pieces, and both processes copy it; a result
that a client asks for comes through the scheduler besides. Here the message says at which address
of its sender a block lies, and the receiver copies it from there, once (`process_vm_readv`, Linux).

- *Who asks* is a receiver that could read a few bytes of each peer on its host. Containers may
  forbid it; then blocks travel as before.
- *Another process* may have the sender's number, as in other containers, or after its end. So each
  message names 16 random bytes of the sender, and where they lie; they are read behind the block.
  A worker that is being closed changes them, for then it may drop blocks that are being read.
- *Whom to trust.* Linux lets a user's processes read each other. Where it is set to refuse (Yama),
  a worker lets its parent's other children read it, and nobody else.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host

from multimm.cluster.plugins.families import (
    NeverReadError,
    answer,
    ask,
    ask_as_client,
    behind,
    same_host,
)

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: Name of the plugin, and of Dask's family of serializers.
NAME = "multimm-host-memory"
#: Bytes of a block from which on it is read so. Arbitrary: smaller ones take as long either way.
LEAST_BYTES = 2**16
#: Bytes whose copy takes a millisecond or more: other threads make it.
LONG_BYTES = 2**22
#: Bytes of a long block that one thread copies at a time.
PART_BYTES = 2**25
#: What Linux says of a process that has ended; of another one with its number, now and then.
LOST = (errno.ESRCH, errno.EFAULT)
#: Of Linux's prctl: PR_SET_PTRACER, which processes may read this one. Refused where none may not.
SET_READER = 0x59616D61


class Process(NamedTuple):
    """A process whose blocks are read, and how to tell it from others."""

    pid: int
    address: int  #: of the mark
    mark: bytes


class HostMemory(WorkerPlugin):
    """Has a worker read its peers' NumPy blocks where they lie, where they are on the same host.

    Attributes
    ----------
    direct : bool
        Whether it does.
    refused : bool
        Whether a peer could not be read.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.direct, self.refused = False, False

    def setup(self, worker: Worker) -> None:
        """Be ready to answer; `begin` asks."""
        self.direct, self.refused = False, False
        answer(NAME, say_where, read)  # peers that are concerned ask this one, too
        if _is_concerned(worker):
            _let_siblings_read()

    def teardown(self, worker: Worker) -> None:
        """Have copies fail that are under way: blocks may go before they are over."""
        _mark_this_process()

    async def meet(self, worker: Worker, peer: str) -> None:
        """Try to read a peer on this host."""
        if not _is_concerned(worker) or _host(peer) != _host(worker.address):
            return
        found: Any = await worker.rpc(peer).run(function=pickle.dumps(_process_if_concerned))
        if found["status"] == "OK" and not _can_read(found["result"]):
            self.refused = True
            logger.info("the memory of worker %s cannot be read", peer)

    def begin(self, worker: Worker) -> None:
        """Ask peers for blocks as they lie, from now on."""
        if _is_concerned(worker) and not self.refused:
            ask(worker.rpc, NAME)
            self.direct = True


def begin_in(client: Client) -> None:
    """Have a client on the workers' host fetch results so, and from the workers themselves."""
    found = client.run(_process_if_concerned).values()
    if found and all(map(_can_read, found)):
        answer(NAME, say_where, read)
        ask_as_client(client, NAME)


def _is_concerned(worker: Worker) -> bool:
    """Whether its blocks travel between processes, and this kind of system can read them."""
    return worker.address.startswith(("tcp:", "tls:")) and _library() is not None


def _host(address: str) -> str:
    return str(get_address_host(address))


# ------------------------------------------------------------------ the two ends


def say_where(x: Any, context: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Serialize a NumPy array without gaps, and not of objects, for a process of this host."""
    if type(x) is not np.ndarray or x.nbytes < LEAST_BYTES or x.dtype.hasobject:
        raise NotImplementedError
    if not x.flags.forc or not same_host(context):
        raise NotImplementedError
    try:
        dtype = pickle.dumps(x.dtype)  # ml_dtypes' have no text
    except Exception:
        raise NotImplementedError from None  # Dask leaves out what a user has added to it
    return {
        "process": tuple(_process()),
        "address": x.ctypes.data,
        "shape": x.shape,
        "order": "C" if x.flags.c_contiguous else "F",
        "dtype": dtype,
        "writeable": x.flags.writeable,
    }, []


def read(header: Mapping[str, Any], frames: Sequence[Any]) -> Any:
    """Deserialize: copy a block from the memory of its owner.

    Raises `OSError` where that fails, as if the connection had: Dask asks again.
    """
    process, address = Process(*header["process"]), header["address"]
    x = np.empty(header["shape"], pickle.loads(header["dtype"]), header["order"])
    x.flags.writeable = header["writeable"]
    for start in range(0, x.nbytes, PART_BYTES):
        fill = functools.partial(_fill, x, start, process, address)
        if x.nbytes < LONG_BYTES:
            fill()
        else:
            behind(fill)
    return x


def _fill(x: Any, start: int, process: Process, address: int) -> None:
    """Copy the part of a block that begins at byte `start`."""
    try:
        _copy(process, address, x, start)
    except OSError as error:
        if process in _met and error.errno in LOST and not _answers(process):
            raise
        reason = f"blocks travel over the network's loopback from now on: {error}"
        raise NeverReadError(NAME, reason) from error
    _met.add(process)


# ----------------------------------------------------------- memory of other processes

#: By which others tell this process; it stays where it is.
_MARK = np.empty(16, "u1")
#: Processes that could be read.
_met: set[Process] = set()


def _mark_this_process() -> None:
    _MARK[:] = np.frombuffer(os.urandom(_MARK.nbytes), "u1")


_mark_this_process()
os.register_at_fork(after_in_child=_mark_this_process)


class _Part(ctypes.Structure):
    """The system's iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _process() -> Process:
    """This one."""
    return Process(os.getpid(), _MARK.ctypes.data, _MARK.tobytes())


def _process_if_concerned(dask_worker: Worker) -> Process | None:
    """Runs on a worker."""
    return _process() if _is_concerned(dask_worker) else None


def _can_read(process: Process | None) -> bool:
    if process is not None and _answers(process):
        _met.add(process)
    return process in _met


def _answers(process: Process) -> bool:
    try:
        _copy(process, process.address, np.empty_like(_MARK))
    except OSError as error:
        logger.debug("process %d cannot be read: %s", process.pid, error)
        return False
    return True


def _copy(process: Process, address: int, x: Any, start: int = 0) -> None:
    """Fill part of an array without gaps, from byte `start` on, from another process's memory."""
    nbytes, mark = min(PART_BYTES, x.nbytes - start), np.empty_like(_MARK)
    mine = _parts((x.ctypes.data + start, nbytes), (mark.ctypes.data, mark.nbytes))
    theirs = _parts((address + start, nbytes), (process.address, mark.nbytes))
    read = _library().process_vm_readv(process.pid, mine, 2, theirs, 2, 0)
    number = ctypes.get_errno() if read < 0 else errno.ESRCH
    if read < mark.nbytes + nbytes or mark.tobytes() != process.mark:
        raise OSError(number, f"process {process.pid} was not read: {os.strerror(number)}")


def _parts(*parts: tuple[int, int]) -> Any:
    return (_Part * len(parts))(*(_Part(*part) for part in parts))


@functools.cache
def _library() -> Any:
    """The C library, if it can read other processes."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.process_vm_readv.restype = ctypes.c_ssize_t
        library.process_vm_readv.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
            ctypes.c_ulong,
        )  # fmt: skip
    except (OSError, AttributeError):
        return None
    return library


def _let_siblings_read() -> None:
    """Where processes may read their descendants alone, also let the parent's other ones."""
    _library().prctl(SET_READER, ctypes.c_ulong(os.getppid()))
