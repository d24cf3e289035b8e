"""What was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multimm.display import html
from multimm.display.units import duration, flops, human


@dataclass(frozen=True)
class Comparison:
    """A plan's prediction beside a run: ``print`` shows a line for each figure.

    Attributes
    ----------
    predicted, measured : float
        Seconds.
    flops : int
        Floating-point operations of the plan.
    bytes_predicted, bytes_measured : int or None
        That workers received from each other; None if they were not counted.
    """

    predicted: float
    measured: float
    flops: int
    bytes_predicted: int | None = None
    bytes_measured: int | None = None
    at_most: str = ""  #: stands before the bytes that were predicted, where they are a bound

    @property
    def ratio(self) -> float:
        """Measured to predicted seconds: above 1 it took longer."""
        return self.measured / max(self.predicted, 1e-12)

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """What, predicted, measured, and the ratio."""
        both = self.predicted, self.measured
        yield ("time", *map(duration, both), f"{self.ratio:.2f}")
        rates = (f"{flops(self.flops / max(x, 1e-12))}/s" for x in both)
        yield ("rate", *rates, f"{1 / max(self.ratio, 1e-12):.2f}")
        planned, moved = self.bytes_predicted, self.bytes_measured
        if planned is not None and moved is not None:
            yield (
                "moved",
                self.at_most + human(planned),
                human(moved),
                f"{moved / planned:.2f}" * bool(planned),
            )

    def __str__(self) -> str:
        lines = [_HEAD, *self.rows]
        return "\n".join(f"{a:<9} {b:>16} {c:>14} {d:>20}".rstrip() for a, b, c, d in lines)

    def _repr_html_(self) -> str:
        return html.page("Predicted and measured", html.table(self.rows, _HEAD))


_HEAD = ("", "predicted", "measured", "measured/predicted")
