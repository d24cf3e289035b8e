"""Tasks that give their worker's thread up, so that it begins another one in their place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def give_up_thread() -> None:
    """Let the worker begin another task in this one's place."""
    from distributed import secede

    # No worker of distributed's; or one that has done so already, in the same task.
    with suppress(ValueError, KeyError):
        secede()


@contextmanager
def beside_other_tasks(room: threading.BoundedSemaphore) -> Iterator[None]:
    """Let the worker begin another task meanwhile, if there is room for one more that does so."""
    beside = room.acquire(blocking=False)
    try:
        if beside:
            give_up_thread()
        yield
    finally:
        if beside:
            room.release()
