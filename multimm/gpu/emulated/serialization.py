"""What Dask must know of a `PackedBlock`: its size, and how it travels and is spilled.

Without this a packed block would count as a few bytes of host memory and travel by pickle, through
the host. `register` is called where packed blocks are made or arrive in a process that uses
distributed; nothing is imported before.
"""

from __future__ import annotations

import functools
import sys

from multimm.gpu.emulated.packed import PackedBlock


@functools.cache
def register() -> None:
    """Register sizeof, and that each array travels as CuPy's do: "dask" and "cuda" frames."""
    from dask.sizeof import sizeof
    from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
    from distributed.protocol.serialize import register_generic

    sizeof.register(PackedBlock)(lambda block: block.nbytes)
    register_generic(PackedBlock)
    register_generic(PackedBlock, "cuda", cuda_serialize, cuda_deserialize)
    if sys.modules.get("dask_cuda"):  # as in every worker that it has started
        from dask_cuda.is_device_object import is_device_object

        is_device_object.register(PackedBlock)(lambda block: True)
