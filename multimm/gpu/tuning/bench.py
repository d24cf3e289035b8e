"""A product on a GPU, checked and timed: what `tuning` measures with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from multimm.gpu import product
from multimm.gpu.simt.configs import TileConfig
from multimm.gpu.tuning.autotune import Case

Array = Any

_UNIT = 2.0**-24  #: half the distance of float32 neighbours, relative
#: Roundings besides the k of the products and sums: alpha, and the sum of a split k.
_MORE_ROUNDINGS = 8
_STRIP_ELEMENTS = 2**24  #: of a strip of rows that is checked at a time; arbitrary
_SEED = 2026


def _cupy() -> Any:
    import cupy

    return cupy


class GpuBench:
    """Normal random operands on a device, and every configuration's launches as CUDA graphs.

    Parameters
    ----------
    case : Case
    device : int
    configs : mapping of str to TileConfig
        By name; the first one's result is held against float64, the others' against it.
    """

    def __init__(self, case: Case, device: int, configs: Mapping[str, TileConfig]) -> None:
        self._cupy = cupy = _cupy()
        self._configs = configs
        self._device = cupy.cuda.Device(device)
        self._case = case
        self._graphs: dict[tuple[str, int], Any] = {}
        with self._device:
            random = cupy.random.RandomState(_SEED)
            shapes = (case.m, case.k), (case.k, case.n)
            stored = [
                shape[::-1] if turned else shape
                for shape, turned in zip(shapes, case[3:], strict=True)
            ]
            self._a, self._b = (random.standard_normal(shape, dtype="float32") for shape in stored)
            self._out = cupy.empty((case.m, case.n), np.float32)
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
            self._device.synchronize()
            self._expected = self._default()

    def _default(self) -> Array:
        """The first configuration's result, held against float64."""
        config = next(iter(self._configs.values()))
        expected = product.gemm(self._a, self._b, **self._sides, config=config)
        a, b = self._sided()
        wide = b.astype(np.float64)
        rows = max(1, _STRIP_ELEMENTS // max(self._case.n, self._case.k, 1))
        self._default_is_right = True
        for first in range(0, self._case.m, rows):
            strip = a[first : first + rows].astype(np.float64)
            bound = (self._case.k + _MORE_ROUNDINGS) * _UNIT * (abs(strip) @ abs(wide))
            error = abs(expected[first : first + rows] - strip @ wide)
            # Written so that NaN fails.
            self._default_is_right &= bool((error <= bound + 2.0**-120).all())
        return expected

    def _launch(self, name: str) -> None:
        config = self._configs[name]
        product.gemm(self._a, self._b, **self._sides, out=self._out, config=config)

    @property
    def _sides(self) -> dict[str, Any]:
        return {"trans_a": self._case.trans_a, "trans_b": self._case.trans_b}

    def _sided(self) -> tuple[Array, Array]:
        a, b = self._a, self._b
        return a.T if self._case.trans_a else a, b.T if self._case.trans_b else b

    def wrong(self, name: str) -> str:
        """Why a configuration must not be used; empty if its result is right."""
        cupy = self._cupy
        if not self._default_is_right:
            return "the default result is wrong"
        with self._device, self._stream:
            self._out.fill(np.nan)
            self._launch(name)
            same = cupy.array_equal(self._out.view(np.int32), self._expected.view(np.int32))
            return "" if bool(same) else "other bits than the default"

    def seconds(self, name: str, launches: int) -> float:
        """Time per launch of so many in a row, by events around the replay of a CUDA graph."""
        cupy = self._cupy
        with self._device, self._stream:
            graph = self._graphs.get((name, launches)) or self._captured(name, launches)
            self._start.record(self._stream)
            graph.launch(self._stream)
            self._stop.record(self._stream)
            self._stop.synchronize()
            milliseconds: float = cupy.cuda.get_elapsed_time(self._start, self._stop)
        return milliseconds / 1e3 / launches

    def _captured(self, name: str, launches: int) -> Any:
        """Launches without the time that Python takes between them, warmed up."""
        self._stream.begin_capture()
        for _ in range(launches):
            self._launch(name)
        graph = self._graphs[name, launches] = self._stream.end_capture()
        graph.launch(self._stream)
        return graph
