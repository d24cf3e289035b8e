"""The Python side of kernels/: what to launch, with which parameters, on which arrays.

A product goes through these layers once, from the top down; each hands a value to the next one, and
none looks at the arrays again.

=============== ======================================= ===========================================
layer           question                                module
=============== ======================================= ===========================================
call            was one of this kind launched before?   `runtime.launch_cache`
checks          do the arrays fit? -> `Problem`         `problem`, `strides`
kernel          which one is fastest? -> `Choice`       `kernel_selection`
configuration   how does it cut its work? -> values     `simt.configs`, `simt.load_paths`,
                                                        `simt.thin`, `emulated.configs`
preparation     which grids and arguments? -> `Run`     `simt.gemm`, `simt.thin`, `simt.split_k`,
                                                        `emulated.gemm`, `emulated.multiply`
launch          from addresses into the stream          `runtime.launch`
=============== ======================================= ===========================================

`product.gemm` is that line of calls. A `Run` takes addresses alone, so that `launch_cache` keeps it
for the next product of the kind. `simt` are the FP32 units: sgemm_ffma, and the kernels of skinny
products. `complex_gemm` stands above this line: it multiplies complex64 by products of their real
numbers. `emulated` are float32 products on the tensor cores: `pack` splits operands into FP16
parts, once for many products (`PackedBlock`), `multiply` multiplies these, and `outliers` adds what
they do not carry. `integers` multiplies integers exactly, there or by float products of a library.
`residues` multiplies large matrices of float64 and of complex numbers by products of bytes, on the
INT8 tensor cores.

Beside products: `elementwise` adds partial results, transposes, copies blocks, and writes complex
matrices as real ones; `transfer` carries blocks between host memory and a GPU; `library_gemm` is
what runs where no kernel of ours does; `runtime.kernel_source`, `runtime.jit` and
`runtime.file_cache` make machine code of kernels/; `arch` has the limits of chips. `last_choice`
says what ran.
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


def __dir__() -> list[str]:
    return sorted(__all__)
