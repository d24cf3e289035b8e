"""The workers that a product is planned for, as a plain value.

`multimm.cluster.describe` makes one of a running cluster; a test or a laptop writes it by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from multimm.errors import OptionError
from multimm.planning.devices import INFINIBAND, LOCAL_TCP, NVLINK, DeviceSpec, Link, between_nodes
from multimm.planning.explain import workers as said

#: Of a product on workers of H200s: 11 to 13 ms on two and on four, and where eight of them shared
#: one GPU; 6 to 7 ms where there is only one worker.
CALL_S, LONE_CALL_S = 12e-3, 7e-3

#: Workers, at most: arbitrary. Arrangements of more take seconds to compare.
MOST_WORKERS = 4096


def call_seconds(workers: int) -> float:
    """Seconds of a call on so many workers, without its tasks."""
    return CALL_S if workers > 1 else LONE_CALL_S


def at_once(devices: Sequence[DeviceSpec], threads: int) -> int:
    """Block products that a worker of so many threads computes at a time: on GPUs one fills it."""
    return min(1, threads) if all(x.kind == "gpu" for x in devices) else threads


def _check_count(workers: int) -> None:
    if workers > MOST_WORKERS:
        raise OptionError(f"{workers} workers: at most {MOST_WORKERS} are planned for; give fewer")


@dataclass(frozen=True, repr=False)
class ClusterSpec:
    """The workers that a product is planned for.

    Parameters
    ----------
    devices : tuple of DeviceSpec
        One per worker.
    link : Link
        Between any two workers of a node.
    addresses : tuple of str
        The workers' addresses, in the order of `devices`; empty for a cluster on paper.
    threads : int
        Block products that one worker runs at the same time (`at_once`).
    task_overhead_s : float
        Scheduler time per task, seconds (0.5 ms of the scheduler's and the client's processor
        in a product of 4096 tasks; threads of one process need less).
    call_s : float
        Seconds of a product without tasks: planned, sent, begun, and waited for (`call_seconds`;
        threads of one process need less).
    per_node : int
        Workers of one node, next to each other in `devices`. 0: all are on one.
    between : Link
        From one worker to one on another node.
    numbers : tuple of int
        Of workers that a plan has numbered anew (`candidates.rank_map`): their places among
        the scheduler's workers. Empty: their own.
    among : int
        How many workers there are, where these are only the first ones. 0: no more.
    """

    devices: tuple[DeviceSpec, ...] = field(hash=False)  # looked up with every layout
    link: Link = field(default=LOCAL_TCP, hash=False)
    addresses: tuple[str, ...] = field(default=())
    threads: int = 1
    task_overhead_s: float = 5e-4
    call_s: float = CALL_S
    per_node: int = 0
    between: Link = field(default=INFINIBAND, hash=False)
    numbers: tuple[int, ...] = ()
    among: int = 0

    def __post_init__(self) -> None:
        if not self.devices:
            raise OptionError("a cluster needs at least one worker, got none")
        _check_count(len(self.devices))
        if self.addresses and len(self.addresses) != len(self.devices):
            raise OptionError(
                f"{len(self.addresses)} addresses for {len(self.devices)} devices: give one each"
            )
        if self.threads < 1:
            raise OptionError(f"threads={self.threads}: at least 1 is needed")
        if self.per_node < 0:
            raise OptionError(f"per_node={self.per_node}: 0 or more are needed")

    def __repr__(self) -> str:
        return f"<{said.text(self)}>"

    def _repr_html_(self) -> str:
        return said.page(self)

    @classmethod
    def homogeneous(
        cls, device: DeviceSpec, workers: int, link: Link = NVLINK, threads: int = 1
    ) -> ClusterSpec:
        """A cluster of equal workers, on paper."""
        if workers < 1:
            raise OptionError(f"workers={workers}: at least 1 is needed")
        _check_count(workers)
        call_s, between = call_seconds(workers), between_nodes(link)
        return cls((device,) * workers, link, threads=threads, call_s=call_s, between=between)

    @property
    def on_gpus(self) -> bool:
        """Whether every worker computes on a GPU."""
        return all(device.kind == "gpu" for device in self.devices)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.devices)

    @property
    def alone(self) -> bool:
        """Whether there is one worker, and no other that it leaves out."""
        return max(self.workers, self.among) == 1

    @property
    def node(self) -> int:
        """How many workers share a node."""
        return self.per_node or self.workers

    def first(self, workers: int) -> ClusterSpec:
        """The first so many workers: those that have a place in a grid of so many."""
        if workers >= self.workers:
            return self
        return replace(
            self,
            devices=self.devices[:workers],
            addresses=self.addresses[:workers],
            numbers=self.numbers[:workers],
            among=self.among or self.workers,
        )

    def reordered(self, order: Sequence[int]) -> ClusterSpec:
        """The same workers with other ranks: `order` has their present ones."""
        numbers = tuple(self.number(rank) for rank in order)
        return replace(
            self,
            devices=tuple(self.devices[rank] for rank in order),
            addresses=tuple(self.addresses[rank] for rank in order if self.addresses),
            numbers=() if numbers == tuple(range(self.workers)) else numbers,
        )

    def number(self, rank: int) -> int:
        """The place of a worker among the scheduler's."""
        return self.numbers[rank] if self.numbers else rank

    def ranks(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of workers by their places among the scheduler's."""
        if not self.numbers:
            return numbers
        ranks = {number: rank for rank, number in enumerate(self.numbers)}
        return tuple(ranks[number] for number in numbers)

    @cached_property
    def slowest(self) -> DeviceSpec:
        """The device whose rate bounds an even division of the work."""
        return min(self.devices, key=lambda device: device.gflops)

    @cached_property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use at once on the smallest worker."""
        return min(device.budget_bytes for device in self.devices)
