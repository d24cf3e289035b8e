"""The dtype of a sum of products of several arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from multimm.gpu.dtypes import result_dtype


def common_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's dtype of a sum of products of arrays of these dtypes.

    That of all of them at once, which may be narrower than one pair after the other: int16, uint16
    and float32 make float32. bfloat16, of which NumPy knows less, goes by pairs, as in `matmul`.
    """
    if any(dtype.name == "bfloat16" for dtype in dtypes):
        return functools.reduce(result_dtype, dtypes, dtypes[0])
    return np.result_type(*dtypes)
