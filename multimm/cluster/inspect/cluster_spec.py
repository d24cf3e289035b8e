"""What a client says of its workers, as the value that plans are made from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from multimm.cluster.inspect.devices import PROCESS_BYTES, cpu_device
from multimm.cluster.inspect.workers import Answer, ask
from multimm.errors import printable
from multimm.planning.devices import (
    H200,
    LOCAL_TCP,
    NVLINK,
    SHARED_MEMORY,
    DeviceSpec,
    Link,
    between_nodes,
)
from multimm.planning.hardware import ClusterSpec, at_once, call_seconds

if TYPE_CHECKING:
    from distributed import Client

#: Addresses of the workers that have a result, by its key.
Holders = Mapping[Any, Sequence[str]]

#: Answers by worker address: a process never changes what it is.
_answers: WeakKeyDictionary[Client, dict[str, Answer]] = WeakKeyDictionary()


def listed(client: Client) -> Mapping[str, Any]:
    """The workers as the scheduler lists them, by address; empty once the client is closed."""
    workers, _ = listed_with(client, ())
    return workers


def listed_with(client: Client, keys: Sequence[Any]) -> tuple[Mapping[str, Any], Holders]:
    """The workers as the scheduler lists them, and who has the results of some keys.

    An asynchronous client is not asked for keys. What the scheduler is asked for before a product
    is sent is asked at once: each question takes a millisecond.
    """
    if client.status != "running":
        return {}, {}
    if client.asynchronous:
        # The client itself knows the number of its workers only, a cluster object all of them.
        return getattr(client.cluster, "scheduler_info", {}).get("workers", {}), {}
    scheduler: Any = client.scheduler

    async def ask() -> tuple[Mapping[str, Any], Holders]:
        if (own := _beside(client)) is not None:
            return own.identity()["workers"], own.get_who_has(keys) if keys else {}
        # Not scheduler_info: what the client keeps of it is written over in the background, and
        # lacks the workers for a moment.
        questions = [scheduler.identity(n_workers=-1)]
        if keys:
            questions.append(scheduler.who_has(keys=list(keys)))
        info, *held = await asyncio.gather(*questions)
        return info.get("workers", {}), held[0] if held else {}

    answer: tuple[Mapping[str, Any], Holders] = client.sync(ask)
    return answer


def _beside(client: Client) -> Any:
    """The scheduler, where it runs in the client's own event loop: it answers without messages."""
    from distributed import Scheduler

    found = getattr(client.cluster, "scheduler", None)
    return found if isinstance(found, Scheduler) and found.loop is client.loop else None


def as_shipped(client: Client, workers: Mapping[str, Any]) -> ClusterSpec:
    """The spec of listed workers, at least one, without what was measured."""
    answers = _answers.setdefault(client, {})
    if not client.asynchronous:
        answers.update(ask(client, [address for address in workers if address not in answers]))
    return spec_of(workers, answers)


def silent(client: Client, workers: Mapping[str, Any]) -> list[str]:
    """The workers whose kind `as_shipped` had to guess."""
    return sorted(set(workers) - set(_answers.get(client, {})))


def spec_of(workers: Mapping[str, Any], answers: Mapping[str, Answer]) -> ClusterSpec:
    """The spec of workers as the scheduler lists them, with what they said themselves.

    A worker without an answer is judged by the scheduler's list alone; there is at least one.
    """
    neighbours = Counter(worker["host"] for worker in workers.values())
    addresses = tuple(sorted(workers))
    devices = tuple(
        _device(address, workers[address], answers.get(address), neighbours)
        for address in addresses
    )
    threads = at_once(devices, min(worker["nthreads"] for worker in workers.values()))
    # Sorted by address, the workers of a host follow one another.
    counts = set(neighbours.values())
    per_node = counts.pop() if len(neighbours) > 1 and len(counts) == 1 else 0
    known = [answers.get(address) for address in addresses]
    direct = all(answer is not None and answer.direct for answer in known)
    link, between = _links(addresses[0], devices, direct, per_node > 0 or len(neighbours) == 1)
    return ClusterSpec(
        devices,
        link,
        addresses,
        max(1, threads),
        call_s=call_seconds(len(devices)),
        per_node=per_node,
        between=between,
    )


def _device(
    address: str, worker: Mapping[str, Any], answer: Answer | None, neighbours: Mapping[str, int]
) -> DeviceSpec:
    if answer is not None and answer.gpu is not None:
        return replace(answer.gpu, name=printable(answer.gpu.name))
    # "gpu" alone only says that the host has one.
    if answer is None and address.startswith("ucx") and (gpu := worker.get("gpu")):
        # Rates of another chip: they cancel out in comparisons between plans for equal workers.
        memory, rates = int(gpu["memory-total"]), (H200.gflops, H200.copy_gbps)
        return DeviceSpec(printable(gpu["name"]), "gpu", memory, *rates)
    limit = worker["memory_limit"]
    if limit:
        memory = int(limit)
    elif answer is not None:
        # No limit: an even share of the host, as if every worker there took one.
        memory = answer.host_memory // neighbours[worker["host"]]
    else:
        from distributed.system import memory_limit

        memory = memory_limit() // neighbours[worker["host"]]
    cores = answer.cores if answer is not None else worker["nthreads"]
    # A nanny ends a worker for all that its process holds; workers in threads have no nanny.
    process = PROCESS_BYTES if limit and worker.get("nanny") else 0
    name = answer.cpu if answer is not None else ""
    return cpu_device(memory, cores, name=name, spills=bool(limit), process_bytes=process)


def _links(
    address: str, devices: tuple[DeviceSpec, ...], direct: bool, by_host: bool
) -> tuple[Link, Link]:
    """The link between workers of a host and the one between hosts.

    `by_host`: what holds within a host may be said apart from what holds between them.
    """
    scheme = address.partition("://")[0]
    if scheme == "inproc":
        return SHARED_MEMORY, SHARED_MEMORY
    if all(device.kind == "gpu" for device in devices):
        if scheme.startswith("ucx"):
            return NVLINK, between_nodes(NVLINK)
        if direct and by_host:
            return NVLINK, LOCAL_TCP
    return LOCAL_TCP, LOCAL_TCP
