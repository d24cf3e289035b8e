"""Files under addresses such as ``s3://bucket/name``, read through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from multimm.errors import FileFormatError, one_line

#: ``s3://...``, and chains such as ``simplecache::s3://...``.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
#: What file systems call a tag of an object's content, and the time of its last change.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "created")
#: What servers say of what is not there, over HTTP.
_NOT_THERE = (404, 410)
#: Objects that are asked for at a time; arbitrary.
_ASKED = 32


def is_remote(text: str) -> bool:
    """Whether this is an address, and no local path; ``file://`` is one until it is located."""
    return _ADDRESS.match(text) is not None


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in there."""
    from fsspec.core import url_to_fs  # Dask's own dependency

    try:
        found: tuple[Any, str] = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:  # it says what to install for this protocol
        raise FileFormatError(f"{address}: {one_line(error)}") from None
    except ValueError as error:
        raise FileFormatError(
            f"{address}: fsspec cannot use this address ({one_line(error)}); give a local path or "
            "an address such as s3://, https:// or memory://"
        ) from None
    return found


@contextmanager
def _honest() -> Iterator[None]:
    """Over HTTP, fsspec says of all that goes wrong that nothing is there: raise what did."""
    try:
        yield
    except FileNotFoundError as error:
        cause = error.__cause__
        if cause is None or not type(cause).__module__.startswith("aiohttp"):
            raise
        if getattr(cause, "status", None) in _NOT_THERE:
            raise
        raise cause from None


def opened(address: str) -> Any:
    """An object as an open file of bytes."""
    system, path = file_system(address)
    with _honest():
        file = system.open(path, "rb")
    if getattr(file, "size", 0) is None:
        raise FileFormatError(
            f"{address}: the server does not give parts of it, or not its size; copy it to a local "
            "folder"
        )
    return file


def open_bytes(path: str) -> Any:
    """A local file, or an object, as an open file of bytes."""
    return opened(path) if is_remote(path) else open(path, "rb")


def state(address: str) -> tuple[str, ...]:
    """What the file system says of an object that changes with it; nothing if it is not there."""
    return _state(*file_system(address))


def _state(system: Any, path: str) -> tuple[str, ...]:
    try:
        with _honest():
            return telling(system, path, system.info(path))
    except FileNotFoundError:
        return ()


def states(addresses: Sequence[str]) -> list[tuple[str, ...]]:
    """The states of several objects, asked for side by side."""
    with ThreadPoolExecutor(_ASKED) as pool:
        return list(pool.map(_state, *zip(*map(file_system, addresses), strict=True)))


def telling(system: Any, path: str, info: Mapping[str, Any]) -> tuple[str, ...]:
    """What of an object's description changes with its content: its size, and a tag or a time.

    Listings describe objects in other words than questions for one: what both have is taken.
    """
    size = f"size={info.get('size', info.get('Size'))}"
    for name in _TAGS:
        if info.get(name) is not None:
            return size, f"tag={info[name]}"
    for name in _TIMES:
        if info.get(name) is not None:
            return size, f"time={_seconds(info[name])}"
    if info.get("type") == "file":
        with suppress(NotImplementedError, OSError):
            return size, f"time={_seconds(system.modified(path))}"
    return (size,)


def is_known(told: Sequence[int | str]) -> bool:
    """Whether what was told of an object changes with its content, be its size the same."""
    return len(told) > 1


def _seconds(when: Any) -> str:
    """A time as text, whether it comes as a datetime, as seconds or as text."""
    if isinstance(when, datetime):
        when = when.timestamp()
    return f"{when:.6f}" if isinstance(when, int | float) else str(when)
