"""The Python side of kernels/: what to launch, with which parameters, on which arrays.

`pack` packs an operand once for many products, and `last_choice` says what ran.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multimm.gpu.emulated.pack import pack
    from multimm.gpu.emulated.packed import PackedBlock
    from multimm.gpu.kernel_selection import last_choice
    from multimm.gpu.product import gemm

__all__ = ["PackedBlock", "gemm", "last_choice", "pack"]

#: Where each name lives. They are imported when first used, as those of `multimm` are.
_HOMES = {
    "PackedBlock": "multimm.gpu.emulated.packed",
    "gemm": "multimm.gpu.product",
    "last_choice": "multimm.gpu.kernel_selection",
    "pack": "multimm.gpu.emulated.pack",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'multimm.gpu' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
