"""One measurement: verified once, warmed up, timed in turns with its peers, recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from multimm_benchmarks.cases import Case
from multimm_benchmarks.records import Record, record
from multimm_benchmarks.timing import Call, Gauge, Runs, Timer, interleave, sustain

logger = logging.getLogger(__name__)

Array = Any

U = 2.0**-24  # unit roundoff of float32
#: The same of each dtype that is measured.
UNITS = {"float32": U, "float64": 2.0**-53}


class Errors(NamedTuple):
    """How far a product is from the same in a wider format."""

    relative: float  #: Frobenius norm of the error over that of the product
    componentwise: float  #: largest error over |A| |B|, in units of its dtype's roundoff: `UNITS`
    rms: float  #: root mean square of the same, where |A| |B| is not 0

    def recorded(self) -> Record:
        """Return them by the keys of a record."""
        names = ("rel_error", "componentwise_u", "rms_u")
        return {name: float(f"{value:.3g}") for name, value in zip(names, self, strict=True)}


class WrongResultError(Exception):
    """What was to be timed computes something else."""


@dataclass(slots=True)
class Bench:
    """How long to measure, with what, and the records so far."""

    timer: Timer
    events: Timer | None = None  #: for what a graph would slow down, such as copies
    rounds: int = 5
    target: float = 0.015  #: seconds of one run
    sustained: float = 3.0  #: seconds of sustained figures; 0 leaves them out
    gauge: Gauge | None = None
    records: list[Record] = field(default_factory=list)

    def compare(self, calls: Mapping[str, Call], *, graphs: bool = True) -> dict[str, Runs]:
        """Time calls in turns; without graphs, by whatever `events` is."""
        timer = self.timer if graphs or self.events is None else self.events
        return interleave(timer, calls, self.rounds, self.target)

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
        if "rms_u" in entry:
            ratios += f", off by {entry['componentwise_u']} u, rms {entry['rms_u']} u"
        logger.info("%-34s %-22s %10.3g s %s %s", case, system, runs.median, rate, ratios)
        return entry


def beside(own: Record | None, other: Record | None, peer: str) -> Record | None:
    """Return sustained figures with their ratio to a peer's, if there are any."""
    if own is None or other is None:
        return own
    return {**own, "ratio_vs": {peer: round(own["tflops"] / other["tflops"], 4)}}


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


def widened(xp: Any, x: Array) -> Array:
    """Return a float32 array as float64, to the last bit, and one of float64 as long doubles.

    CuPy's own conversion takes subnormal numbers for zeros, and it has no long doubles.
    """
    if x.dtype == xp.float64:
        return x.astype(xp.longdouble)
    wide, bits = x.astype(xp.float64), x.view(xp.uint32)
    fraction = bits & 0x7FFFFF
    subnormal = ((bits & 0x7F800000) == 0) & (fraction != 0)
    if not bool(subnormal.any()):
        return wide
    signs = 1.0 - 2.0 * (bits >> 31).astype(xp.float64)
    return xp.where(subnormal, signs * fraction.astype(xp.float64) * 2.0**-149, wide)


class Reference:
    """A case's product in float64, and |A| |B|, which bounds the error of every element.

    Of float64 numbers it is in long doubles: of NumPy, on the host.
    """

    def __init__(self, xp: Any, case: Case, a: Array, b: Array) -> None:
        left = widened(xp, a.swapaxes(-1, -2) if case.trans_a else a)
        right = widened(xp, b.swapaxes(-1, -2) if case.trans_b else b)
        self._xp, self._case, self._u = xp, case, UNITS[a.dtype.name]
        self.exact = left @ right
        self.scale = xp.abs(left) @ xp.abs(right)
        self._norm = float(xp.square(self.exact).sum())

    def off(self, out: Array, call: Call) -> Array:
        """Run a call on a poisoned output, and return how far every element of it is off."""
        xp = self._xp
        out[...] = xp.nan
        call()
        if xp.__name__ == "cupy":  # calls run on streams of their own
            xp.cuda.Device().synchronize()
        return xp.abs(widened(xp, out) - self.exact)

    def errors(self, off: Array) -> Errors:
        """Return what `off` amounts to. Where |A||B| is 0, so must every right product be."""
        # Where both are 0 the ratio is 0; where only |A||B| is, it is beyond all bounds.
        ratio = off / self._xp.maximum(self.scale, 2.0**-1000)
        squares, counted = float(self._xp.square(ratio).sum()), int((self.scale > 0).sum())
        norm = float(self._xp.square(off).sum())
        relative = (norm / self._norm) ** 0.5 if self._norm else norm
        rms = (squares / max(counted, 1)) ** 0.5
        return Errors(relative, float(ratio.max()) / self._u, rms / self._u)

    def check(self, out: Array, call: Call, bound: float | None = None) -> Errors:
        """Run a call on a poisoned output, and compare all of it.

        Parameters
        ----------
        out : array
        call : callable
            Writes to `out`.
        bound : float, optional
            How far an element may be off, in units of |A||B|; by default as far as that of a
            dot product in the operands' dtype, (k + 2) u and one rounding.

        Raises
        ------
        WrongResultError
            If an element is farther off; NaN is.
        """
        bound = self._u * (self._case.k + 3) if bound is None else bound
        off = self.off(out, call)
        errors = self.errors(off)
        if not bool((off <= bound * self.scale).all()):
            raise WrongResultError(
                f"{self._case.name}: an element is off by {errors.componentwise:.3g} u |A||B|, "
                f"{bound / self._u:.3g} are allowed"
            )
        return errors
