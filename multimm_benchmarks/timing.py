"""How long a call takes: by GPU events, graphs or the host's clock; interleaved, and sustained.

Nothing here names a kernel, and all but the classes that say so runs without a GPU.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Call = Callable[[], object]

#: A graph or a loop of more calls than this gains nothing.
MOST_CALLS = 1000


class Timer(Protocol):
    """Runs bursts of calls, and says how long one took."""

    def burst(self, call: Call, count: int) -> tuple[Call, str]:
        """Return what runs `count` calls, and how: "graph", "events" or "host"."""

    def seconds(self, burst: Call) -> float:
        """Run a burst and return its duration."""


class HostTimer:
    """The host's clock around a burst and whatever makes sure that it is over.

    With ``through=False`` the clock stops when the last call returns, whatever it has left to a
    GPU: that is what calls cost their caller, as long as they never wait for room in the queue.
    """

    def __init__(
        self,
        wait: Call = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        through: bool = True,
    ) -> None:
        self._wait, self._clock, self._through = wait, clock, through

    def burst(self, call: Call, count: int) -> tuple[Call, str]:
        return _loop(call, count), "host"

    def seconds(self, burst: Call) -> float:
        self._wait()
        start = self._clock()
        burst()
        if self._through:
            self._wait()
        return self._clock() - start


class GpuTimer:
    """Events around a burst on a stream of its own; a captured graph where a call allows it.

    A graph launches kernels without the host's help, so that short ones are timed and not the
    interpreter.
    """

    def __init__(self, graphs: bool = True) -> None:
        import cupy

        self._graphs = graphs
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._events = cupy.cuda.Event(), cupy.cuda.Event()

    def burst(self, call: Call, count: int) -> tuple[Call, str]:
        loop = _loop(call, count)
        with self.stream:
            call()  # compiles, allocates: neither can be captured
            self.stream.synchronize()
            graph = self._captured(loop) if self._graphs else None
        if graph is None:
            return loop, "events"
        return (lambda: graph.launch(self.stream)), "graph"

    def seconds(self, burst: Call) -> float:
        import cupy

        begin, end = self._events
        with self.stream:
            begin.record()
            burst()
            end.record()
            end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1000

    def _captured(self, loop: Call) -> Any:
        self.stream.begin_capture()
        try:
            loop()
        except Exception:  # of whatever library the call belongs to: it is timed by events then
            self._end_capture()
            return None
        return self._end_capture()

    def _end_capture(self) -> Any:
        import cupy

        try:
            graph = self.stream.end_capture()
            graph.upload(self.stream)
        except cupy.cuda.runtime.CUDARuntimeError:  # the capture was broken by the call
            return None
        return graph


def _loop(call: Call, count: int) -> Call:
    def run() -> None:
        for _ in range(count):
            call()

    return run


@dataclass(slots=True)
class Runs:
    """All timed runs of one call: seconds per call, and how they were timed."""

    how: str
    count: int  #: calls in one run
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds)


def interleave(
    timer: Timer, calls: Mapping[str, Call], rounds: int, target: float
) -> dict[str, Runs]:
    """Time calls in turns, ABAB: what the machine does meanwhile, it does to all of them.

    Parameters
    ----------
    timer : Timer
    calls : mapping of str to callable
    rounds : int
        Runs of each call.
    target : float
        Seconds that one run takes at least, by calling as often as needed.
    """
    bursts, runs = {}, {}
    for name, call in calls.items():
        bursts[name], runs[name] = prepare(timer, call, target)
    for _ in range(rounds):
        for name, burst in bursts.items():
            runs[name].seconds.append(timer.seconds(burst) / runs[name].count)
    return runs


def prepare(timer: Timer, call: Call, target: float) -> tuple[Call, Runs]:
    """Warm a call up and return a burst of it that takes `target` seconds or one call."""
    probe, how = timer.burst(call, 1)
    timer.seconds(probe)
    once = timer.seconds(probe)
    if once > 0 and once < target:  # launching alone may be most of one call
        probe, how = timer.burst(call, min(MOST_CALLS, math.ceil(target / once / 8)))
        once = timer.seconds(probe) / min(MOST_CALLS, math.ceil(target / once / 8))
    count = min(MOST_CALLS, max(1, math.ceil(target / once))) if once > 0 else 1
    if count > 1:
        probe, how = timer.burst(call, count)
        timer.seconds(probe)
    return probe, Runs(how, count)


@dataclass(slots=True)
class Sustained:
    """What a call does for seconds on end."""

    seconds: float  #: per call
    duration: float  #: of all calls
    sm_mhz: float | None
    watts: float | None
    joules: float | None  #: per call


class Gauge(Protocol):
    """What a GPU draws, and how fast it runs."""

    def sample(self) -> tuple[float, float]:
        """Clock of the multiprocessors in MHz, and power in watts."""

    def joules(self) -> float:
        """Energy drawn since some moment in the past."""


class NvmlGauge:
    """The driver's own instruments, for one GPU."""

    def __init__(self, bus_id: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)

    def sample(self) -> tuple[float, float]:
        nvml = self._nvml
        clock = nvml.nvmlDeviceGetClockInfo(self._gpu, nvml.NVML_CLOCK_SM)
        return float(clock), nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1000


def sustain(
    timer: Timer,
    call: Call,
    duration: float,
    gauge: Gauge | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sustained:
    """Call for at least `duration` seconds without a pause, while a gauge is read.

    Samples of the first half are dropped: power and clock take a second to settle.
    """
    burst, runs = prepare(timer, call, min(0.2, duration))
    samples: list[tuple[float, float]] = []
    over = threading.Event()

    def watch() -> None:
        while gauge is not None and not over.wait(0.05):
            samples.append(gauge.sample())

    watcher = threading.Thread(target=watch)
    watcher.start()
    busy = calls = 0.0
    drawn = gauge.joules() if gauge else 0.0
    start = clock()
    while clock() - start < duration:
        busy += timer.seconds(burst)
        calls += runs.count
    elapsed = clock() - start
    drawn = gauge.joules() - drawn if gauge else 0.0
    over.set()
    watcher.join()
    late = samples[len(samples) // 2 :]
    return Sustained(
        seconds=busy / calls,
        duration=elapsed,
        sm_mhz=statistics.median(mhz for mhz, _ in late) if late else None,
        watts=statistics.median(watts for _, watts in late) if late else None,
        joules=drawn / calls if gauge else None,
    )
