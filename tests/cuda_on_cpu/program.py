"""A kernel text as a program of the host, and the launches that it is fed with."""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cuda_on_cpu.compiler import build
from cuda_on_cpu.translate import HostText, host_text

_ENVIRONMENT = {
    # Threads run on stacks of their own; nothing is ever freed by a kernel.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:symbolize=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class KernelFault(Exception):
    """A kernel ran into a sanitizer or a divergent barrier; the text is what it printed."""


@dataclass(frozen=True)
class Pointer:
    """An argument: `offset` bytes into a buffer of the launch."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Struct:
    """An argument: a struct by value, of pointers and 64-bit integers."""

    members: tuple[object, ...]


@dataclass
class Buffer:
    """Global memory of `size` bytes of which `spans`, by offset, are given and read back."""

    size: int
    spans: dict[int, np.ndarray]

    @classmethod
    def of(cls, values: np.ndarray) -> Buffer:
        """Memory that is exactly as large as an array."""
        return cls(values.nbytes, {0: values})


@dataclass
class Launch:
    """One launch: arguments are integers, floats, `Pointer`s, `Struct`s, or None for null."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    arguments: Sequence[object]
    buffers: Sequence[Buffer]
    shared: int = 0  #: bytes of dynamic shared memory
    seed: int = 0  #: of the order of threads and blocks
    what: str = field(default="", kw_only=True)  #: for messages

    def packed(self) -> bytes:
        """As runtime.cpp reads it."""
        name = self.kernel.encode()
        out = [struct.pack("<Q", len(name)), name, struct.pack("<3Q", *self.grid),
               struct.pack("<5Q", self.threads, 1, 1, self.shared, self.seed),
               struct.pack("<Q", len(self.buffers))]  # fmt: skip
        for buffer in self.buffers:
            out.append(struct.pack("<2Q", buffer.size, len(buffer.spans)))
            for offset, values in buffer.spans.items():
                out += [struct.pack("<2Q", offset, values.nbytes), values.tobytes()]
        out.append(struct.pack("<Q", len(self.arguments)))
        return b"".join([*out, *map(_packed_argument, self.arguments)])


def _packed_argument(value: object) -> bytes:
    kind, buffer, integer, floating = "p", -1, 0, 0.0
    members: tuple[object, ...] = ()
    if isinstance(value, Pointer):
        buffer, integer = value.buffer, value.offset
    elif isinstance(value, (int, np.integer)):
        kind, integer = "i", int(value)
    elif isinstance(value, float):
        kind, floating = "f", value
    elif isinstance(value, Struct):
        kind, integer, members = "s", len(value.members), value.members
    else:
        assert value is None, f"{value!r} is no kernel argument"
    head = struct.pack("<Qqqd", ord(kind), buffer, integer, floating)
    return head + b"".join(map(_packed_argument, members))


@dataclass(frozen=True)
class Outcome:
    """What the buffers of each launch held afterwards, and which sites were reached."""

    buffers: list[list[Buffer]]
    reached: frozenset[int]


@dataclass(frozen=True)
class Program:
    """A built kernel text."""

    path: Path
    host: HostText

    def run(self, launches: Sequence[Launch], without: int = -1) -> Outcome:
        """Run launches, without the barrier, wait or commit of that number.

        Raises
        ------
        KernelFault
            On the first access out of bounds, undefined behaviour or divergent barrier.
        """
        packed = struct.pack("<Q", len(launches)) + b"".join(x.packed() for x in launches)
        done = subprocess.run(
            [self.path, str(without)], input=packed, capture_output=True,
            env={**os.environ, **_ENVIRONMENT}, timeout=240,
        )  # fmt: skip
        buffers, rest = _unpacked(done.stdout, launches)
        if done.returncode:
            at = launches[len(buffers)].what if len(buffers) < len(launches) else ""
            # AddressSanitizer does not know these stacks, and says so when the program ends.
            lines = done.stderr.decode(errors="replace")[:4000].splitlines(keepends=True)
            message = self._with_lines("".join(x for x in lines if "stack type: default" not in x))
            raise KernelFault(f"{at}: exit status {done.returncode}\n{message}")
        return Outcome(buffers, frozenset(np.frombuffer(rest, np.int32).tolist()))

    def _with_lines(self, message: str) -> str:
        """File and line in place of an address in the code."""
        address = re.search(r"code (0x[0-9a-f]+)", message)
        if address is None or shutil.which("addr2line") is None:
            return message
        before = hex(int(address[1], 16) - 1)  # the call, not what comes after it
        found = subprocess.run(["addr2line", "-e", str(self.path), before], capture_output=True)
        return message.replace(address[0], found.stdout.decode().strip())


def _unpacked(output: bytes, launches: Sequence[Launch]) -> tuple[list[list[Buffer]], bytes]:
    """The buffers of the launches that came to their end, and what follows them."""
    at, done = 0, []
    for launch in launches:
        size = sum(values.nbytes for buffer in launch.buffers for values in buffer.spans.values())
        if len(output) - at < size:
            break
        buffers = []
        for buffer in launch.buffers:
            spans = {}
            for offset, values in buffer.spans.items():
                spans[offset] = np.frombuffer(output, values.dtype, values.size, at)
                at += values.nbytes
            buffers.append(Buffer(buffer.size, spans))
        done.append(buffers)
    return done, output[at:]


_workers = ThreadPoolExecutor(os.cpu_count() or 2)


def _build(kernel_text: str, arch: int, races: bool) -> Program:
    host = host_text(kernel_text)
    return Program(build(host.text, arch, races), host)


@functools.cache
def started(kernel_text: str, arch: int = 900, races: bool = False) -> Future[Program]:
    """Begin to build in the background; the same text is built once.

    Parameters
    ----------
    kernel_text : str
    arch : int
        ``__CUDA_ARCH__``.
    races : bool
        Watch shared memory for races, in place of bounds and undefined behaviour.
    """
    return _workers.submit(_build, kernel_text, arch, races)
