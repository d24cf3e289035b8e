"""What a function refers to: for what is kept between calls, and must keep no operand alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any


def arrays_behind(kept: Any) -> list[Any]:
    """CuPy arrays, or what stands in for them, that cannot be freed as long as `kept` is there."""
    seen, found, left = set(), [], [kept]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "strides"):
            found.append(x)
        left += _referents(x)
    return found


def _referents(x: Any) -> Iterator[Any]:
    """What an object refers to, but for what is there anyway."""
    if isinstance(x, FunctionType):
        for cell in x.__closure__ or ():
            yield cell.cell_contents
        yield from (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    elif not isinstance(x, ModuleType | type):
        yield from gc.get_referents(x)
