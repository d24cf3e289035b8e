"""Compiled, loaded and launched on a GPU: files, subnormals, streams, graphs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from multimm.cluster.calibration.probes import product_gflops
from multimm.cluster.calibration.run import FIRST_EFFORT
from multimm.gpu import precompile, product
from multimm.gpu.runtime import jit as compiling
from multimm.gpu.runtime import launch as runtime_launch
from multimm.graph.warmup import copy_both_ways, run_tasks

if find_spec("cupy"):  # where there is none, the mark leaves these tests out
    import cupy
pytestmark = pytest.mark.gpu

TEXTS = {
    "scale.cu": """
extern "C" __global__ void scale(float* x, float by) {
  x[threadIdx.x] = x[threadIdx.x] * by + 0.0f;
}
""",
    "large.cu": """
extern "C" __global__ void large(float* x) {
  extern __shared__ float kept[];
  kept[threadIdx.x * 600] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = kept[(31 - threadIdx.x) * 600];
}
""",
}


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    """Files of their own, and kernels that are not in kernels/."""
    monkeypatch.setenv("MULTIMM_CACHE_DIR", str(tmp_path))
    original = runtime_launch.kernel_text
    monkeypatch.setattr(
        runtime_launch,
        "kernel_text",
        lambda name, defines: TEXTS.get(name) or original(name, defines),
    )
    runtime_launch.kernel_for.cache_clear()
    yield tmp_path
    runtime_launch.kernel_for.cache_clear()


def device() -> int:
    return cupy.cuda.runtime.getDevice()


def test_all_that_tasks_launch_is_compiled_at_once(directory, monkeypatch):
    """None is compiled after the others, alone; nor is what the first start measures."""
    precompile.compile_files(int(cupy.cuda.Device().compute_capability), 16)
    late, compile_text = [], compiling.compile_text

    def noted(text, *args):
        late.append(text)
        return compile_text(text, *args)

    monkeypatch.setattr(compiling, "compile_text", noted)
    run_tasks()
    copy_both_ways()
    for precision in ("ieee", "float32", "tf32"):
        product_gflops(precision, (FIRST_EFFORT["gpu"].edge, FIRST_EFFORT["gpu"].k), 0.01, gpu=True)
    assert [text[-200:] for text in late] == []


def test_subnormals_survive():
    x = np.full(32, 2.0**-130, np.float32)
    y = cupy.asarray(x)
    runtime_launch.kernel_for(device(), "scale.cu", "scale", ())((1,), (32,), (y, np.float32(0.5)))
    np.testing.assert_array_equal(cupy.asnumpy(y), x * np.float32(0.5))
    assert (cupy.asnumpy(y) > 0).all()


def test_a_second_process_loads_the_file_and_compiles_nothing(directory, monkeypatch):
    first = runtime_launch.kernel_for(device(), "scale.cu", "scale", ())
    assert first.attributes["num_regs"] > 0
    runtime_launch.kernel_for.cache_clear()
    monkeypatch.setattr(compiling, "compile_text", None)
    runtime_launch.kernel_for(device(), "scale.cu", "scale", ())
    assert len(list((directory / "kernels").iterdir())) == 1


def test_large_shared_memory_is_granted():
    x = cupy.arange(32, dtype=np.float32)
    nbytes = 32 * 600 * 4
    kernel = runtime_launch.kernel_for(device(), "large.cu", "large", (), shared_bytes=nbytes)
    kernel((1,), (32,), (x,), shared_mem=nbytes)
    np.testing.assert_array_equal(cupy.asnumpy(x), np.arange(32)[::-1])


def test_a_product_can_be_captured_in_a_graph():
    rng = np.random.default_rng(1)
    a, b = (cupy.asarray(rng.integers(-8, 9, (100, 100)).astype("f4")) for _ in "ab")
    out = cupy.zeros((100, 100), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        # The first one of its kind: loaded while capturing.
        product.gemm(a, b, precision="ieee", out=out)
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(a) @ cupy.asnumpy(b))
            a += 1
            stream.synchronize()
