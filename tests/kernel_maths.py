"""Index arithmetic that kernels state in one-line functions, as Python."""

from __future__ import annotations

import re
from typing import Any

_CONSTANT = re.compile(r"^constexpr int (\w+) = ([^;]+);", re.MULTILINE)
_FUNCTION = re.compile(
    r"^__device__ constexpr int (\w+)\(([^)]*)\) \{ return ([^;]+); \}", re.MULTILINE
)


def functions_of(text: str, **defines: int) -> dict[str, Any]:
    """The constants and functions of a header by name.

    They are single expressions of non-negative ints, for which C's / is Python's //.
    """
    scope: dict[str, Any] = dict(defines)
    for name, value in _CONSTANT.findall(text):
        scope[name] = eval(value.replace("/", "//"), scope)
    for name, parameters, body in _FUNCTION.findall(text):
        arguments = ", ".join(re.findall(r"int (\w+)", parameters))
        scope[name] = eval(f"lambda {arguments}: {body.replace('/', '//')}", scope)
    return scope
