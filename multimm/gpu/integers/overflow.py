"""A warning of sums of integers that can leave the dtype of their product, and wrap around."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from multimm.errors import IntegerOverflowWarning, callers_level
from multimm.gpu.dtypes import result_dtype
from multimm.gpu.integers.bounds import is_narrow, sums_fit

#: Dtypes of operands and result of which it was said: a program multiplies the same ones again and
#: again.
_warned: set[tuple[str, str, str]] = set()


def warn_of_overflow(a: np.dtype[Any], b: np.dtype[Any], k: int, dtype: str, asked: bool) -> None:
    """Warn, once for these dtypes, of a product of k terms of narrow integers.

    Not where `dtype` was asked for and is the one that NumPy's rule gives: then it is meant.
    """
    if a.kind not in "iu" or b.kind not in "iu" or not (is_narrow(a) and is_narrow(b)):
        return
    made = np.dtype(dtype)
    if made.kind not in "iu" or sums_fit(a, b, k, made) or (asked and made == result_dtype(a, b)):
        return
    key = a.name, b.name, made.name
    if key in _warned:
        return
    enough = next((x for x in ("int32", "int64") if sums_fit(a, b, k, np.dtype(x))), "float64")
    meant = "" if asked else f", dtype='{made}' says that this is meant"
    warnings.warn(
        f"a product of {' and '.join(dict.fromkeys((a.name, b.name)))} with k = {k} is {made}: "
        f"sums that it cannot hold wrap around, as in NumPy. dtype='{enough}' holds all{meant}",
        IntegerOverflowWarning,
        stacklevel=callers_level(),
    )
    _warned.add(key)  # a warning that a filter makes an error comes again
