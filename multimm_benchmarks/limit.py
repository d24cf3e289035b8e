"""How long a sweep has been under way, and how long it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: Seconds after which a quick sweep measures nothing more. It is to be over after two minutes: a
#: group has up to 5 s to end (`group.SETTLE`), the command's own start and the table
#: take 2 s, and a GPU's driver some to let go of its memory.
QUICK_SECONDS = 110.0
#: Why a case has no figure that a quick sweep did not come to, and the one that it broke off.
TIME_IS_UP = "a quick sweep ends after two minutes"
NOT_BEGUN, BROKEN_OFF = f"not begun: {TIME_IS_UP}", f"broken off: {TIME_IS_UP}"


class Limit:
    """Begins when it is made.

    Parameters
    ----------
    seconds : float
        How long it may take.
    clock : callable
        Seconds, of a clock that nobody sets.
    """

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._clock, self._begun = seconds, clock, clock()

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._begun

    @property
    def left(self) -> float:
        """Seconds that remain; 0 when time is up."""
        return max(0.0, self._seconds - self.passed)

    def before(self, others: float, own: float) -> Limit:
        """The limit of what runs now, where others need so many seconds, and it needs `own`.

        What is not there for all of them is missing from each in proportion.
        """
        needed = max(others + own, 1e-9)
        return Limit(self.left - min(others, self.left * others / needed), self._clock)
