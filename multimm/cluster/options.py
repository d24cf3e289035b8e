"""What `start` and `connect` are asked for: options and certificates, checked, and the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multimm.cluster.inspect.devices import Gpu, visible_gpus
from multimm.errors import OptionError, integer

if TYPE_CHECKING:
    from distributed import Security

LOOPBACK = "127.0.0.1"
PROTOCOLS = ("tcp", "ucxx")
#: CPU workers without an explicit number; arbitrary: enough to use several memory channels,
#: few enough that BLAS keeps several threads for each block product.
MAX_CPU_WORKERS = 4
#: Share of the host's free memory that all workers together may take; arbitrary: the scheduler,
#: the client and the system need some.
HOST_SHARE = 0.9
#: Host memory of a GPU worker at least, by the memory of its GPU; arbitrary. Some virtual
#: machines show little memory at first and grow, and with too small a limit Dask pauses a worker
#: for what its libraries take.
HOST_MEMORY_PER_GPU_BYTE = 0.25
#: Memory limit of a worker at least. A CPU worker holds 68 MB when it has started and 92 after its
#: first product (Python 3.11, distributed 2026.8, Linux). Dask pauses it at 0.8 of its limit and
#: ends it at 0.95: with 110 MB and 100 that product waited for ever, with 90 Dask gave it up, with
#: 50 the worker was gone before it; with 120 it was computed.
LEAST_MEMORY = 120_000_000
#: How to ask for encryption.
ASK = (
    "distributed.Security.temporary(), or distributed.Security(require_encryption=True, ...) with "
    "certificates"
)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What `start` was asked for, checked: `gpus` is empty for CPU workers."""

    gpus: tuple[Gpu, ...]
    workers: int
    threads: int
    memory_limit: int
    protocol: str
    rmm_pool: float | int | str | None
    security: Security | None
    dashboard_address: str | None


def check(
    gpus: int | None = None,
    workers: int | None = None,
    threads: int = 1,
    memory_limit: int | str | None = None,
    protocol: str | None = None,
    rmm_pool: float | int | str | None = None,
    security: Security | None = None,
    dashboard_address: str | None = None,
) -> StartOptions:
    """Turn the arguments of `multimm.cluster.start` into decisions, or refuse them."""
    for name, value, least in (("gpus", gpus, 0), ("workers", workers, 1), ("threads", threads, 1)):
        number = integer(value)
        if (value is not None or name == "threads") and (number is None or number < least):
            raise OptionError(f"{name}={value!r}: at least {least} is needed, an integer")
    if gpus and workers is not None:
        raise OptionError(
            f"gpus={gpus} and workers={workers}: give gpus for GPU workers or workers for CPU "
            "workers, not both"
        )
    chosen = _choose_gpus(gpus if workers is None else 0)
    count = len(chosen) or workers or min(cores(), MAX_CPU_WORKERS)
    return StartOptions(
        chosen,
        count,
        threads,
        _memory_limit(memory_limit, count, chosen),
        _protocol(protocol, security, gpu=bool(chosen)),
        _pool(rmm_pool, chosen),
        security,
        _dashboard(dashboard_address),
    )


def _choose_gpus(asked: int | None) -> tuple[Gpu, ...]:
    if asked == 0:
        return ()
    found = visible_gpus()
    if asked is not None and asked > len(found):
        raise OptionError(
            f"gpus={asked}: this host has {len(found)} visible to this process; ask for at most "
            "that many, or for CPU workers with gpus=0"
        )
    return found[:asked]


def _protocol(protocol: str | None, security: Security | None, *, gpu: bool) -> str:
    if protocol is not None and protocol not in PROTOCOLS:
        raise OptionError(f"protocol={protocol!r}: allowed are {' and '.join(PROTOCOLS)}")
    if security is not None:
        if protocol == "ucxx":
            raise OptionError('security with protocol="ucxx": UCXX has no TLS; use protocol="tcp"')
        check_encrypts(security)
        return "tls"
    if protocol == "ucxx" and not gpu:
        raise OptionError('protocol="ucxx" is for GPU workers; use protocol="tcp" for CPU workers')
    return protocol or "tcp"


def _memory_limit(limit: int | str | None, workers: int, gpus: tuple[Gpu, ...]) -> int:
    if limit is None:
        import psutil  # type: ignore[import-untyped]
        from distributed.system import memory_limit

        host, bound = psutil.virtual_memory(), memory_limit()
        share = int(HOST_SHARE * min(bound, host.available)) // workers
        if bound >= host.total:  # else a container's or a batch job's: it will not grow
            least = [int(gpu.memory_bytes * HOST_MEMORY_PER_GPU_BYTE) for gpu in gpus]
            share = max([share, *least])
        return _enough(share, f"{workers} workers, {share / 1e6:.0f} MB of host memory each")
    if (parsed := _bytes(limit)) <= 0:
        raise OptionError(
            f"memory_limit={limit!r}: bytes above 0 are needed, such as 2000000000 or '2GB'"
        )
    return _enough(parsed, f"memory_limit={limit!r}")


def _pool(size: float | int | str | None, gpus: tuple[Gpu, ...]) -> float | int | str | None:
    """What dask-cuda would refuse in a worker's process is refused here."""
    if size is None or (isinstance(size, float) and 0 < size < 1):
        return size
    smallest = min((gpu.memory_bytes for gpu in gpus), default=None)
    nbytes = _bytes(size)
    if nbytes <= 0 or (smallest is not None and nbytes > smallest):
        memory = "" if smallest is None else f", of the {smallest} of a GPU at most"
        raise OptionError(
            f"rmm_pool={size!r}: a share below 1, bytes{memory}, text such as '100GB', or None"
        )
    return size


def pool_bytes(size: float | int | str | None, gpu: Gpu) -> int:
    """Bytes of a GPU's memory pool, of a size as `start` takes it; 0 without one."""
    if size is None:
        return 0
    return int(size * gpu.memory_bytes) if isinstance(size, float) and size < 1 else _bytes(size)


def _bytes(size: Any) -> int:
    """A number of bytes, or text that says one; 0 for anything else."""
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(size))
    except (ValueError, TypeError, AttributeError, OverflowError):  # neither text nor number
        return 0


def _enough(memory_limit: int, given: str) -> int:
    if memory_limit < LEAST_MEMORY:
        raise OptionError(
            f"{given}: a worker process itself takes some 100 MB, and Dask pauses it before its "
            f"limit; give each at least {LEAST_MEMORY // 10**6} MB, of fewer workers if need be"
        )
    return memory_limit


def _dashboard(address: str | None) -> str | None:
    if address is not None and not isinstance(address, str):
        raise OptionError(f'dashboard_address={address!r}: give text, such as ":8787"')
    return f"{LOOPBACK}{address}" if address is not None and address.startswith(":") else address


def cores() -> int:
    """Cores that this process may use."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)


def check_encrypts(security: Security) -> None:
    """Raise OptionError for credentials that would be taken, and not used."""
    if not hasattr(security, "require_encryption"):  # without importing distributed
        raise OptionError(f"security={security!r}: give {ASK}")
    if not security.require_encryption:
        raise OptionError(
            "security without require_encryption: the cluster would talk in plaintext, with "
            f"certificates or without; give {ASK}, or leave security out"
        )


def check_certificates(security: Security, *roles: str) -> None:
    """Read those of some roles ("client", "worker", "scheduler"), or raise `OptionError`.

    distributed would try again until the timeout, and not name the file.
    """
    needed = ("tls_ca_file", *(f"tls_{role}_cert" for role in roles))
    files = {name: getattr(security, name) for name in (*needed, *(f"tls_{r}_key" for r in roles))}
    if missing := [name for name in needed if not files[name]]:
        whose = "a client needs" if roles == ("client",) else "each side needs"
        raise OptionError(
            f"security without {' and '.join(missing)}: {whose} the authority's certificate "
            "and its own, with its key; give them, or set distributed.comm.tls in Dask's "
            "configuration"
        )
    try:
        for role in roles:
            security.get_connection_args(role)
    except OSError as error:  # ssl.SSLError, too
        # In memory they are texts of many lines.
        named = ", ".join(
            f"{name}={path if chr(10) not in path else '(in memory)'}"
            for name, path in files.items()
            if path
        )
        raise OptionError(
            f"certificates cannot be read ({error}): {named}; the files must exist, be readable, "
            "hold PEM, and belong together"
        ) from error


def give_back(borrowed: Mapping[str, str]) -> None:
    """Take out of this process's environment what nobody has set to another value since."""
    for name, value in borrowed.items():
        if os.environ.get(name) == value:
            del os.environ[name]
