"""The transport that overlaps: what `distributed_ucxx` waits for before it moves a GPU block.

Before each send and each receive of GPU memory it waits for the whole device, on the event loop of
the worker: for every kernel that runs, whatever it works on. So no block travels while a product
is computed. The plugin here makes it wait for stream 0 alone. That is enough where the rules of
`multimm.graph.streams` are kept:

- *Sending.* A block that Dask knows was made by a task that has returned. Our tasks synchronise
  their stream before; other libraries', as they come, run on stream 0, which is waited for.
- *Receiving.* The buffer comes from RMM's pool in the order of stream 0. Whatever still uses
  this memory from before does so in the order of stream 0: our tasks synchronise their stream
  before they give memory back.
- *While a block is sent* the transport refers to it, and nobody writes to a block: tasks are
  pure. What has been received is complete before Dask hears of it.

Tasks of others that use CUDA streams of their own and neither synchronise them nor order them
before stream 0 are not safe with it. They would not be safe within one worker, either, but the
wide wait has hidden that between workers. Therefore only clusters from `start()`, or with
`connect(..., overlap=True)`, get this plugin.

It replaces an internal function of another package, and does so only in releases whose source is
known to call that function before every transfer, and nothing else. There it also lets messages
hold more, and has the event loop pack and unpack them, however large. Over TCP nothing waits for
other streams: `multimm.cluster.plugins.cuda_ipc`.
"""

from __future__ import annotations

import logging
import os

from distributed import Worker, WorkerPlugin

from multimm.cluster.plugins.transport import raise_limits, wait_for_stream_0

logger = logging.getLogger(__name__)

NAME = "multimm-overlap"
#: Releases whose `distributed_ucxx.ucxx.synchronize_stream` was read: (major, minor).
KNOWN = ((0, 52),)
#: With these set, "stream 0" means another stream to CuPy or RMM than to the rules.
PER_THREAD_VARIABLES = ("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "RMM_PER_THREAD_DEFAULT_STREAM")


class Overlap(WorkerPlugin):
    """Has the transport of its worker wait for stream 0 alone, and send larger messages.

    Attributes
    ----------
    reason : str
        Why blocks do not travel during products; empty where they do, or where nothing had to be
        changed for it.
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.reason = ""

    def setup(self, worker: Worker) -> None:
        """Replace the wait, in a process of the worker's own; again in one that replaces it."""
        self.reason = ""
        if not worker.address.startswith("ucx"):
            return
        if obstacle := _obstacle():
            self.reason = f"blocks travel between products, not during them: {obstacle}"
            logger.warning("%s", self.reason)
            return
        import distributed_ucxx.ucxx as transport
        from distributed.comm import utils

        transport.synchronize_stream = synchronize_stream_0
        # Blocks are sent as they lie: in another thread that takes longer than in the event loop.
        utils.OFFLOAD_THRESHOLD = False
        raise_limits(worker)


def _obstacle() -> str:
    """Why the wait cannot be replaced in this process; empty where it can."""
    try:
        import cupy  # noqa: F401
        import distributed_ucxx.ucxx as transport
        import ucxx
        from distributed_ucxx import __version__ as version
    except ImportError as error:
        return f"{error.name} cannot be imported"
    for name, release in (("distributed_ucxx", version), ("ucxx", ucxx.__version__)):
        if _release(release) not in KNOWN:
            known = ", ".join(".".join(map(str, numbers)) for numbers in KNOWN)
            return f"{name} {release} is not known to multimm (known: {known})"
    if not callable(getattr(transport, "synchronize_stream", None)):
        return f"distributed_ucxx {version} has no synchronize_stream"
    chosen = [name for name in PER_THREAD_VARIABLES if os.environ.get(name, "0") != "0"]
    return f"{chosen[0]} is set" if chosen else ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def synchronize_stream_0(*_: object) -> None:
    """What the transport calls in place of its own wait, with its own arguments."""
    wait_for_stream_0()
