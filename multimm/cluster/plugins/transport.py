"""What both ways of GPU blocks between workers share: `cuda_ipc` and `ucxx_overlap`."""

from __future__ import annotations

from typing import Any

from distributed import Worker

#: Dask stops asking for more while a tenth of the *host's* memory limit is on its way. GPU blocks
#: never touch the host: a GPU takes up to this share of its own memory instead. Arbitrary: some
#: 18 GB on an H200, seventeen blocks of 16384 x 16384.
IN_FLIGHT_SHARE = 1 / 8
#: A fetch takes milliseconds, and a worker answers it with as many blocks as fit, Dask says in
#: 50 MB: one block of 4096 x 4096. docs/decisions/host-offload.md has the times. Blocks of the host
#: travel so, too: no more than Dask lets be on its way there, a tenth of its memory limit.
MESSAGE_BYTES = 2**30


def wait_for_stream_0() -> None:
    """Wait for stream 0 of the worker's GPU, which is device 0 to it."""
    import cupy

    with cupy.cuda.Device(0):
        stream = cupy.cuda.Stream.null
        if not stream.done:  # to wait gives the interpreter up, and has to get it back
            stream.synchronize()


def raise_limits(worker: Worker) -> None:
    """Have a worker ask for more at once than Dask lets it."""
    import cupy

    state: Any = worker.state
    share = int(cupy.cuda.runtime.memGetInfo()[1] * IN_FLIGHT_SHARE)
    of_host = state.transfer_incoming_bytes_limit
    state.transfer_incoming_bytes_limit = max(of_host, share)
    most = min(MESSAGE_BYTES, of_host)
    state.transfer_message_bytes_limit = max(state.transfer_message_bytes_limit, most)
