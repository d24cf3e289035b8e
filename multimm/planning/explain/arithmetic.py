"""How blocks are multiplied: what is promised of each dtype, and what computes it."""

from __future__ import annotations

from multimm.planning.problem import DIGITS
from multimm.planning.schedule import Schedule

#: Of operands that are packed for the tensor cores.
_PACKED = {
    "float32": "tensor cores, by three FP16 products; as accurate as a float32 dot product",
    "tf32": "tensor cores, by one FP16 product of operands rounded to 11 bits",
}
_RESIDUES = "on INT8 tensor cores, by residues, where its bound is proved; else"
_HALVES = "tensor cores, by one FP16 product, which holds the operands; sums in float32"
#: Without BLAS: what is longer than a double.
_WIDE = ("float96", "float128", "complex192", "complex256")


def arithmetic(layout: Schedule, precision: str, *, gpu: bool) -> str:
    """What computes the block products of a schedule on GPUs or CPUs, and how exactly."""
    p = layout.problem
    sums, blas = p.accumulate, "cuBLAS" if gpu else "NumPy's BLAS"
    if sums == "bool":
        return f"logical or of ands, on {blas}, as sums in {p.exact} that are not zero"
    if p.exact == DIGITS:
        return (
            f"{_exact(p.dtype)}, on {blas}, as float64, in ranges of k that round nothing; numbers "
            "too large for that in digits, which takes several times as long"
        )
    if p.exact:
        units = {"tf32": "tensor cores, as FP16"}.get(p.exact, f"{blas}, as {p.exact}")
        if p.byte_products:
            cut = f", by {p.byte_products} products of bytes" * (p.byte_products > 1)
            return f"{_exact(p.dtype)}, on INT8 tensor cores{cut}"
        return f"{_exact(p.dtype)}, on {units}, in ranges of k that round nothing"
    if sums in _WIDE:
        return f"{sums}, by NumPy's own loops, without BLAS"
    if sums in ("float64", "complex128") and p.packs:
        return f"{sums}, {_RESIDUES} by cuBLAS"
    if not gpu or sums in ("float64", "complex128"):
        widened = "" if p.dtype == sums else f", rounded to {p.dtype} at the end"
        return f"{sums}, by {blas}{widened}"
    if sums == "complex64":
        if not p.packs:
            return "complex64, by cuBLAS"
        reals = f"as real numbers on {_PACKED[p.pack]}"
        return f"complex64, {_RESIDUES} {reals}" if p.by_residues else f"complex64, {reals}"
    if not layout.on_tensor_cores:
        return "float32, by multimm's kernel with FP32 multiply-adds"
    halves = p.pack == "tf32" and precision != "tf32"
    return f"float32, on {_HALVES if halves else _PACKED[p.pack]}"


def _exact(dtype: str) -> str:
    """What an exact sum becomes.

    >>> _exact("int32"), _exact("float32")
    ('exact modulo 2^32', 'exact, rounded once to float32')
    """
    if dtype.startswith(("int", "uint")):
        return f"exact modulo 2^{dtype.lstrip('uint')}"
    return "exact" if dtype == "bool" else f"exact, rounded once to {dtype}"
