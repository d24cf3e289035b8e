"""XLA's float32 products by several products of BF16 or TF32, where JAX is installed."""

from __future__ import annotations

import functools
import logging
import os
from importlib.util import find_spec
from typing import Any

from multimm_benchmarks.timing import Call

logger = logging.getLogger(__name__)

Array = Any

#: By the names of jax.lax.DotAlgorithmPreset.
MODES = {
    "xla bf16 x3": "BF16_BF16_F32_X3",
    "xla bf16 x6": "BF16_BF16_F32_X6",
    "xla tf32 x3": "TF32_TF32_F32_X3",
}


def products(a: Array, b: Array, out: Array) -> dict[str, Call]:
    """Return calls of XLA that write a @ b to `out`, of those modes that run here.

    Parameters
    ----------
    a, b, out : cupy.ndarray of float32
        On one device, C-contiguous.
    """
    calls: dict[str, Call] = {}
    for system, mode in MODES.items() if available() else ():
        call = functools.partial(_multiply, _compiled(mode), a, b, out)
        try:
            call()
        except Exception as reason:  # each mode runs on some GPUs only
            logger.info("%s left out: %s", system, str(reason).partition("\n")[0])
            continue
        calls[system] = call
    return calls


@functools.cache
def available() -> bool:
    """Whether XLA computes on a GPU here; says in the log why not."""
    if find_spec("jax") is None:
        logger.info("XLA left out: JAX is not installed")
        return False
    # Before JAX is imported: it would take three quarters of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        return bool(jax.devices("gpu"))
    except Exception as reason:  # the import and the search for a GPU fail in many ways
        logger.info("XLA left out: %s", reason)
        return False


@functools.cache
def _compiled(mode: str) -> Any:
    import jax

    preset = getattr(jax.lax.DotAlgorithmPreset, mode)
    dimensions = (((1,), (0,)), ((), ()))
    product = functools.partial(jax.lax.dot_general, dimension_numbers=dimensions, precision=preset)
    return jax.jit(product)


def _multiply(product: Any, a: Array, b: Array, out: Array) -> None:
    """The copy to `out` is timed with the product: it is small beside it."""
    import cupy
    import jax

    cupy.cuda.get_current_stream().synchronize()
    result = product(*(jax.numpy.from_dlpack(x) for x in (a, b)))
    out[...] = cupy.from_dlpack(result.block_until_ready())
