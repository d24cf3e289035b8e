"""What computing takes of this process's memory."""

from __future__ import annotations

import tracemalloc


def peak_of(lazy):
    """Bytes of NumPy arrays that computing it takes."""
    return peak_and_value(lazy)[0]


def peak_and_value(lazy):
    """That, and what it is."""
    tracemalloc.start()
    try:
        value = lazy.compute()
        return tracemalloc.get_traced_memory()[1], value
    finally:
        tracemalloc.stop()
