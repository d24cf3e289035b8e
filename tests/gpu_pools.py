"""Processes that stand for GPU workers with memory pools: until they are killed, they wait."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from multimm.cluster.plugins import peer_memory
from multimm.cluster.plugins.peer_memory import Pool


@contextmanager
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, killed at the end if not before."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def pool_of(process: subprocess.Popen[bytes]) -> Pool:
    """The pool that it would have."""
    return Pool(
        peer_memory._boot(), process.pid, peer_memory._started(process.pid), b"handle".ljust(64)
    )
