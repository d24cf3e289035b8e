"""Numbers in units that a person reads."""

from __future__ import annotations

#: Seconds from which on a duration is said in the next unit, and how many of them that one has.
_LONGER = ((120.0, 60.0, "min"), (2 * 3600.0, 3600.0, "h"), (2 * 86400.0, 86400.0, "days"))
_SHORTER = ((1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def human(size: float) -> str:
    """Bytes.

    >>> human(2_000_000_000)
    '2 GB'
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds, or what is closer.

    >>> [duration(s) for s in (0, 8.03e-06, 0.238, 10.27, 4330, 90_000, 1e6)]
    ['0 s', '8.03 us', '238 ms', '10.3 s', '72.2 min', '25 h', '11.6 days']
    """
    for least, of, unit in reversed(_LONGER):
        if seconds >= least:
            return f"{_digits(seconds / of)} {unit}"
    if seconds >= 0.9995 or seconds <= 0:
        return f"{_digits(seconds)} s"
    of, unit = next((x for x in _SHORTER if seconds >= 0.9995 * x[0]), _SHORTER[-1])
    return f"{seconds / of:.3g} {unit}"


def flops(count: float) -> str:
    """Multiplications and additions, as ``"70.4 TFLOP"``; a rate is so many a second.

    >>> flops(7.037e13), flops(1.323e15) + "/s", flops(29.57e9)
    ('70.4 TFLOP', '1,323 TFLOP/s', '29.6 GFLOP')
    """
    for of, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= 0.9995 * of:
            return f"{_digits(count / of)} {unit}"
    return f"{_digits(count)} FLOP"


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"
