"""What computing takes of this process's memory."""

from __future__ import annotations

import tracemalloc


def peak_of(lazy):
    """Bytes of NumPy arrays that computing it takes."""
    tracemalloc.start()
    try:
        lazy.compute()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
