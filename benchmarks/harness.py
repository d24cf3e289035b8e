"""One measurement: verified once, warmed up, timed in turns with its peers, recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.cases import Case
from benchmarks.records import Record, record
from benchmarks.timing import Call, Gauge, Runs, Timer, interleave, sustain

logger = logging.getLogger(__name__)

Array = Any

U = 2.0**-24  # unit roundoff of float32


class Errors(NamedTuple):
    """How far a product is from the same in float64."""

    relative: float  #: Frobenius norm of the error over that of the product
    componentwise: float  #: largest error over |A| |B|, in units of 2^-24


class WrongResultError(Exception):
    """What was to be timed computes something else."""


@dataclass(slots=True)
class Bench:
    """How long to measure, with what, and the records so far."""

    timer: Timer
    rounds: int = 5
    target: float = 0.015  #: seconds of one run
    sustained: float = 3.0  #: seconds of sustained figures; 0 leaves them out
    gauge: Gauge | None = None
    records: list[Record] = field(default_factory=list)

    def compare(self, calls: Mapping[str, Call]) -> dict[str, Runs]:
        """Time calls in turns."""
        return interleave(self.timer, calls, self.rounds, self.target)

    def steady(self, call: Call, flops: float) -> Record | None:
        """Return a call's sustained figures as they are recorded."""
        if not self.sustained:
            return None
        figures = sustain(self.timer, call, self.sustained, self.gauge)
        return {
            "duration": round(figures.duration, 2),
            "tflops": round(flops / figures.seconds / 1e12, 3),
            "sm_mhz": figures.sm_mhz,
            "watts": figures.watts and round(figures.watts, 1),
            "gflop_per_joule": figures.joules and round(flops / figures.joules / 1e9, 2),
        }

    def add(
        self, case: str, system: str, shape: tuple[int, ...], runs: Runs, **more: Any
    ) -> Record:
        """Keep the record of timed runs, and say so in the log."""
        entry = record(case, system, shape, runs.seconds, timing=runs.how, **more)
        self.records.append(entry)
        rate = f"{entry['tflops']:.4g} TFLOP/s" if "tflops" in entry else ""
        rate = f"{entry['gbs']:.0f} GB/s" if "gbs" in entry else rate
        ratios = " ".join(f"{r:.3f} x {peer}" for peer, r in entry.get("ratio_vs", {}).items())
        logger.info("%-34s %-22s %10.3g s %s %s", case, system, runs.median, rate, ratios)
        return entry


def operands(xp: Any, case: Case, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return A, B and D of a case: normal data, D full of NaN, laid out as the case says."""
    rng = xp.random.default_rng(seed)
    placed = []
    for shape in case.shapes:
        *stack, rows, width = shape
        length = rows * (width + case.extra) + case.offset
        whole = xp.full((*stack, length), xp.nan, xp.float32)
        flat = whole[..., case.offset :]
        placed.append(flat.reshape(*stack, rows, width + case.extra)[..., :width])
    for x in placed[:2]:
        x[...] = rng.standard_normal(x.shape, dtype=xp.float32)
    return placed[0], placed[1], placed[2]


class Reference:
    """A case's product in float64, and |A| |B|, which bounds the error of every element."""

    def __init__(self, xp: Any, case: Case, a: Array, b: Array) -> None:
        left = (a.swapaxes(-1, -2) if case.trans_a else a).astype(xp.float64)
        right = (b.swapaxes(-1, -2) if case.trans_b else b).astype(xp.float64)
        self._xp, self._case = xp, case
        self._exact = left @ right
        self._scale = xp.abs(left) @ xp.abs(right)
        self._norm = float(xp.square(self._exact).sum())

    def check(self, out: Array, call: Call) -> Errors:
        """Run a call on a poisoned output, and compare all of it.

        Raises
        ------
        WrongResultError
            If an element is farther off than a float32 dot product may be, (k + 2) u |A||B| and
            one rounding; NaN is.
        """
        xp, bound = self._xp, U * (self._case.k + 3)
        out[...] = xp.nan
        call()
        if xp.__name__ == "cupy":  # calls run on streams of their own
            xp.cuda.Device().synchronize()
        off = xp.abs(out - self._exact)
        worst = float((off / self._scale).max())
        if not worst <= bound:
            raise WrongResultError(
                f"{self._case.name}: an element is off by {worst / U:.3g} u |A||B|, "
                f"{bound / U:.3g} are allowed"
            )
        return Errors((float(xp.square(off).sum()) / self._norm) ** 0.5, worst / U)
