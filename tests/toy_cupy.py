"""NumPy under the name of CuPy as far as the suites of the benchmarks go, and a timer for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
from stand_in import Device, gpu, standing_in

from multimm_benchmarks.timing import GpuTimer, HostTimer


class ToyDevice(Device):
    """A device that can be waited for."""

    def __init__(self, ident=0):
        super().__init__(ident)

    def synchronize(self):
        pass


class ToyTimer(GpuTimer):
    """What passes for a GPU's timer, with the host's clock."""

    def __init__(self):
        self.stream, self._host = contextlib.nullcontext(), HostTimer()

    def burst(self, call, count):
        return self._host.burst(call, count)

    def seconds(self, burst):
        return self._host.seconds(burst)


class ToyGenerator:
    """Random numbers that lie where CuPy's would."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def standard_normal(self, shape, dtype):
        return gpu(self._rng.standard_normal(shape).astype(dtype))

    def random(self, shape, dtype):
        return gpu(self._rng.random(shape, dtype))


_OF_NUMPY = (
    "float32", "float64", "uint8", "uint32", "nan", "abs", "square", "full", "exp",
    "floor", "minimum", "maximum", "where", "asarray", "empty_like", "matmul",
)  # fmt: skip


@contextlib.contextmanager
def toy_cupy() -> Iterator[ModuleType]:
    """For as long as this lasts, `import cupy` gives the module that is returned."""
    with standing_in():
        module = sys.modules["cupy"]
        for name in _OF_NUMPY:
            setattr(module, name, getattr(np, name))
        module.random = SimpleNamespace(default_rng=ToyGenerator)
        module.cuda.Device = ToyDevice
        module.cuda.Stream = SimpleNamespace(null=SimpleNamespace(ptr=0))
        # Not stream 0: tasks then have none of their own.
        stream = SimpleNamespace(ptr=1, synchronize=lambda: None)
        module.cuda.get_current_stream = lambda: stream
        yield module
