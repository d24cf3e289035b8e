"""The options of `multimm.cluster.start`: checked, with the defaults decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multimm.cluster.devices import Gpu, visible_gpus
from multimm.errors import OptionError

if TYPE_CHECKING:
    from distributed import Security

LOOPBACK = "127.0.0.1"
PROTOCOLS = ("ucxx", "tcp")
#: CPU workers without an explicit number; arbitrary: enough to use several memory channels,
#: few enough that BLAS keeps several threads for each block product.
MAX_CPU_WORKERS = 4
#: Dask holds the blocks in flight below a tenth of the *host* memory limit, GPU blocks too.
#: A quarter of the GPU's memory lets a few GB-sized blocks travel at once, also on virtual
#: machines that show little memory at first and grow.
HOST_MEMORY_PER_GPU_BYTE = 0.25


@dataclass(frozen=True, slots=True)
class Options:
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
    gpus: int | None,
    workers: int | None,
    threads: int,
    memory_limit: int | str | None,
    protocol: str | None,
    rmm_pool: float | int | str | None,
    security: Security | None,
    dashboard_address: str | None,
) -> Options:
    """Turn the arguments of `multimm.cluster.start` into decisions, or refuse them."""
    for name, value, least in (("gpus", gpus, 0), ("workers", workers, 1), ("threads", threads, 1)):
        if value is not None and value < least:
            raise OptionError(f"{name}={value}: at least {least} is needed")
    if gpus and workers is not None:
        raise OptionError(
            f"gpus={gpus} and workers={workers}: give gpus for GPU workers or workers for CPU "
            "workers, not both"
        )
    chosen = _choose_gpus(gpus if workers is None else 0)
    count = len(chosen) or workers or min(cores(), MAX_CPU_WORKERS)
    return Options(
        chosen,
        count,
        threads,
        _memory_limit(memory_limit, count, chosen),
        _protocol(protocol, security, gpu=bool(chosen)),
        rmm_pool,
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
        return "tls" if security.require_encryption else "tcp"
    if protocol == "ucxx" and not gpu:
        raise OptionError('protocol="ucxx" is for GPU workers; use protocol="tcp" for CPU workers')
    return protocol or ("ucxx" if gpu else "tcp")


def _memory_limit(limit: int | str | None, workers: int, gpus: tuple[Gpu, ...]) -> int:
    if limit is None:
        from distributed.system import memory_limit

        share = memory_limit() // workers
        return max([share, *(int(gpu.memory_bytes * HOST_MEMORY_PER_GPU_BYTE) for gpu in gpus)])
    from dask.utils import parse_bytes

    try:
        parsed = parse_bytes(limit)
    except ValueError:
        parsed = 0
    if parsed <= 0:
        raise OptionError(
            f"memory_limit={limit!r}: bytes above 0 are needed, such as 2000000000 or '2GB'"
        )
    return int(parsed)


def _dashboard(address: str | None) -> str | None:
    return f"{LOOPBACK}{address}" if address is not None and address.startswith(":") else address


def cores() -> int:
    """Cores that this process may use."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)
