"""What a worker does when another one is gone: give up connections to it, all of them.

The scheduler tells every worker that one was lost, and distributed then drops connections to it,
also those that are being made. But the order to compute a task whose operand the lost worker held
may come in the same message, just before. The fetch is begun then, and its connection only after
the others were dropped: it is tried for `distributed.comm.timeouts.connect`, 30 s, while the task
waits (distributed 2026.7 and 2026.8; seen in one of some twenty products that lost a worker).

So the connections are dropped a second time, a moment later.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Worker, WorkerPlugin

NAME = "multimm-lost-peers"
#: A fetch that has been begun asks for its connection in the next turn of the event loop; this
#: is later, however busy the loop is, because what is due runs in order. Arbitrary otherwise.
SECONDS = 0.1


class LostPeers(WorkerPlugin):
    """Drops connections to a lost worker again, a moment after distributed has."""

    name = NAME
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Come after distributed's own answer to the scheduler's message."""
        first = worker.stream_handlers["remove-worker"]

        def remove_worker(**message: Any) -> None:
            first(**message)
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS, worker.rpc.remove, message["worker"])

        worker.stream_handlers["remove-worker"] = remove_worker
