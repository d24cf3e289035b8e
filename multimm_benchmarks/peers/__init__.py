"""The systems that the scaling sweep compares: one module each, run in a process group of its own.

`python -m multimm_benchmarks.peers SYSTEM` (see __main__.py) is one such group. A module here
imports what its system needs inside functions: the sweep itself asks all of them `missing`.
"""

from __future__ import annotations

from importlib import import_module

from multimm_benchmarks.peers.base import System

#: System -> the module and the class in it, in the order in which they are measured: those that
#: start soon before others, which a quick sweep leaves their time. "multimm" is what the others are
#: compared with.
SYSTEMS = {
    "multimm": ("ours", "Multimm"),
    "cupy": ("cupy_matmul", "Cupy"),
    "cublasxt": ("cublasxt", "CublasXt"),
    "dask.array": ("dask_array", "DaskArray"),
    "jax highest": ("jax_sharded", "JaxHighest"),
    "jax default": ("jax_sharded", "JaxDefault"),
    "numpy": ("numpy_matmul", "NumpyMatmul"),
}
PEERS = tuple(name for name in SYSTEMS if name != "multimm")


def system(name: str) -> type[System]:
    """Return the class of a system."""
    module, entry = SYSTEMS[name]
    found: type[System] = getattr(import_module(f"multimm_benchmarks.peers.{module}"), entry)
    return found
