"""Dense matrix multiplication for Dask arrays, on GPUs and on CPUs.

>>> import dask.array as da, multimm
>>> x = da.ones((4, 3), chunks=2)
>>> multimm.matmul(x, x.T).sum().compute().item()
48.0
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multimm import cluster, errors, gpu, io
    from multimm.api import gemm, matmul, plan, transpose
    from multimm.checks.verify import verify
    from multimm.cluster.progress import progress
    from multimm.contractions.functions import einsum, inner, outer, tensordot, vecdot
    from multimm.dispatch import accelerate
    from multimm.errors import MultimmError
    from multimm.gpu.kernel_selection import Precision

__version__ = "0.2.0"

__all__ = [
    "MultimmError",
    "Precision",
    "accelerate",
    "cluster",
    "einsum",
    "errors",
    "gemm",
    "gpu",
    "inner",
    "io",
    "matmul",
    "outer",
    "plan",
    "progress",
    "tensordot",
    "transpose",
    "vecdot",
    "verify",
]

#: Where each name lives. They are imported when first used: `dask.array` alone takes a
#: second, which a command line that only prints its help should not spend.
_HOMES = {
    "MultimmError": "multimm.errors",
    "Precision": "multimm.gpu.kernel_selection",
    "accelerate": "multimm.dispatch",
    "einsum": "multimm.contractions.functions",
    "gemm": "multimm.api",
    "inner": "multimm.contractions.functions",
    "matmul": "multimm.api",
    "outer": "multimm.contractions.functions",
    "plan": "multimm.api",
    "progress": "multimm.cluster.progress",
    "tensordot": "multimm.contractions.functions",
    "transpose": "multimm.api",
    "vecdot": "multimm.contractions.functions",
    "verify": "multimm.checks.verify",
}
#: Modules that are used by their own names, as in `multimm.io.open_array`.
_MODULES = ("cluster", "errors", "gpu", "io")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"multimm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'multimm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _forked() -> None:
    """Mark the parent's client: no thread here talks for it, and who asks it waits for ever."""
    if "distributed" in sys.modules:
        with suppress(Exception):  # there is none; or it was being imported
            sys.modules["distributed"].Client.current().of_parent_process = True


os.register_at_fork(after_in_child=_forked)
