"""Numbers of Dask's configuration that calls depend on, checked where they are read.

Dask takes them as they are, and its errors do not say which setting they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import dask
from dask.utils import parse_bytes

from multimm.errors import OptionError, integer
from multimm.shapes import Shape

#: Chunks of one array that has none of its own; arbitrary: Dask takes minutes for as many.
MOST_CHUNKS = 10**6


def chunk_bytes() -> int:
    """Bytes of a chunk that nobody gave a size: ``array.chunk-size``."""
    return int(_read("array.chunk-size", _bytes, 'bytes, such as "128MiB", above 0'))


def auto(shape: Shape, itemsize: int, chunks: Any = "auto") -> Any:
    """Chunks as they are given, once it is checked that Dask can size those that are "auto"."""
    each = chunks if isinstance(chunks, tuple | list) else [chunks] * len(shape)
    sized = [n for n, own in zip(shape, each, strict=False) if isinstance(own, str)]
    if "auto" in each:
        check_count(min(prod(sized), prod(shape) * itemsize // chunk_bytes()), shape)
    return chunks


def check_count(count: int, shape: Shape) -> None:
    """Raise `OptionError` for more chunks than an array can have, before they are listed.

    The size of chunks was meant in MiB, say: Dask makes them until memory is full.
    """
    if count > MOST_CHUNKS:
        raise OptionError(
            f"Dask's setting array.chunk-size is {dask.config.get('array.chunk-size')!r}, which "
            f"makes {count:,} chunks of shape {shape}; at most {MOST_CHUNKS:,} are made: give more "
            'bytes, such as "128MiB"'
        )


def chunk_tolerance() -> float:
    """How many times as large as its operands' a chunk of Dask's einsum may be."""
    return float(_read("array.chunk-size-tolerance", float, "a number above 0, such as 1.25"))


def threads() -> int | None:
    """Threads of Dask in this process, ``num_workers``; None where nobody gave them."""
    if dask.config.get("num_workers", None) is None:
        return None
    return int(_read("num_workers", integer, "a whole number above 0, or nothing"))


def _read(name: str, number: Callable[[Any], Any], allowed: str) -> Any:
    given = dask.config.get(name, None)
    try:
        value = number(given)
        if value > 0:
            return value
    except (TypeError, ValueError, AttributeError, OverflowError):
        pass
    variable = "DASK_" + name.upper().replace(".", "__").replace("-", "_")
    raise OptionError(
        f"Dask's setting {name} is {given!r}: give {allowed}, with dask.config.set, "
        f"in Dask's YAML files or as {variable}"
    )


def _bytes(given: Any) -> int:
    return int(parse_bytes(given) if isinstance(given, str) else given)
