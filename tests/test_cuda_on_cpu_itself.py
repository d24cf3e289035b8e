"""What the CPU stand-in for a GPU finds: kernels with one mistake each, and some without.

Races, barriers, votes, exchanges of lanes and copies that land late: tests/test_cuda_on_cpu.py
leaves out each of them in the kernels that we ship, and none may be missed.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import compiler, program
from cuda_on_cpu.products import Tile, problems, product_case, rung
from cuda_on_cpu.program import Buffer, KernelFault, Launch, Pointer, Struct

pytestmark = pytest.mark.slow

COPY = """
__device__ __forceinline__ void copy(float* to, const float* from, int bytes) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
"""

KERNELS = {
    "divergent": "if (threadIdx.x < 5) __syncthreads();",
    "elsewhere": "if (threadIdx.x < 5) __syncthreads();\nelse\n__syncthreads();",
    "half_warp": "if (threadIdx.x % 2) __syncwarp();",
    "write_behind": "out[n + threadIdx.x] = 1.0f;",
    "read_behind": "out[threadIdx.x] = in[n + threadIdx.x];",
    "shared_behind": "__shared__ float s[32]; float* volatile p = s; p[n] = 1.0f; out[0] = p[n];",
    "dynamic_behind": "extern __shared__ float d[]; d[n] = 1.0f; out[0] = d[n];",
    "shared_unwritten": "__shared__ float s[32]; out[threadIdx.x] = s[threadIdx.x];",
    "misaligned": "out[0] = reinterpret_cast<const float4*>(in + 1)->x;",
    "overflow": "const int far = n * 100000000; out[0] = in[far];",
    "order": "out[threadIdx.x] = atomicAdd(out + n, 1.0f);",
    "copy_misaligned": "__shared__ float s[64];"
    "copy(s, reinterpret_cast<const float*>(reinterpret_cast<const char*>(in) + 2), 4);",
    "copy_behind": "__shared__ float s[64]; copy(s + threadIdx.x, in + n, 4);",
}
TEXT = COPY + "\n".join(
    f'extern "C" __global__ void {name}(int n, const float* in, float* out) {{\n{body}\n}}'
    for name, body in KERNELS.items()
)


def run(name: str, *, n: int = 64, threads: int = 64, seed: int = 1, arguments=None) -> np.ndarray:
    given = np.arange(64, dtype=np.float32)
    result = np.zeros(192, np.float32)
    launch = Launch(
        name, (1, 1, 1), threads, arguments or [n, Pointer(0), Pointer(1)],
        [Buffer.of(given), Buffer.of(result)], shared=128, seed=seed, what=name,
    )  # fmt: skip
    built = program.started(TEXT, 900, False).result()
    return built.run([launch]).buffers[0][1].spans[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent", "some threads only: thread 0 waits at .* for its block, but thread 5 has"),
        ("elsewhere", "some threads only"),
        ("half_warp", "some threads only: thread 0 has ended, but thread 1 waits at .* its warp"),
        ("read_behind", "AddressSanitizer: heap-buffer-overflow"),
        ("dynamic_behind", "AddressSanitizer: heap-buffer-overflow"),
        ("misaligned", "load of misaligned address|member access within misaligned address"),
        ("overflow", "signed integer overflow"),
        ("copy_misaligned", "copy of 4 bytes .* is misaligned"),
        ("copy_behind", "AddressSanitizer: heap-buffer-overflow"),
    ],
)
def test_mistakes_end_the_run(name, message):
    with pytest.raises(KernelFault, match=message):
        run(name)


def test_stray_writes_end_the_run():
    with pytest.raises(KernelFault, match="AddressSanitizer: heap-buffer-overflow"):
        run("write_behind", n=192)
    if "-fsanitize-sections=cuda_shared" in compiler._extra_flags():
        with pytest.raises(KernelFault, match="AddressSanitizer: global-buffer-overflow"):
            run("shared_behind", n=32)


def test_shared_memory_begins_as_nan():
    assert np.isnan(run("shared_unwritten", threads=32)[:32]).all()


def test_the_order_of_threads_is_drawn():
    orders = [tuple(run("order", n=64, seed=seed)[:64]) for seed in (1, 1, 2, 3)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert orders[0] == orders[1]
    assert len(set(orders)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([64, Pointer(0)], "declares 3 parameters, the call table gives 2"),
        ([Pointer(0), 64, Pointer(1)], "the kernel declares kind"),
        ([Struct((1, 2)), Pointer(0), Pointer(1)], "argument 0: the kernel declares kind 'i'"),
    ],
)
def test_wrong_calls_are_refused(arguments, message):
    with pytest.raises(KernelFault, match=message):
        run("order", arguments=arguments)


PRODUCT = """
extern "C" __global__ void product(
    long long m, long long n, long long k, float alpha, const float* a, long long lda,
    const float* b, long long ldb, float beta, const float* c, long long ldc, float* d,
    long long ldd) {
  const long long row = blockIdx.x / ((n + 7) / 8) * 8 + threadIdx.x / 8;
  const long long col = blockIdx.x % ((n + 7) / 8) * 8 + threadIdx.x % 8;
  if (row >= m || col >= n) return;
  if (alpha == 0.0f) k = 0;
  if (k == 0) alpha = 0.0f;
  float sum = 0.0f;
  for (int i = 0; i < k; ++i) sum += a[row * lda + i] * b[i * ldb + col];
  d[row * ldd + col] = alpha * sum + (beta == 0.0f ? 0.0f : beta * c[row * ldc + col]);
}
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("row * lda", "row * k"),
        ("i * ldb", "i * n"),
        ("row * ldc", "row * n"),
        ("row * ldd", "row * n"),
        ("row * ldd", "static_cast<int>(row) * static_cast<int>(ldd)"),
        ("row >= m", "row > m"),
        ("i < k", "i <= k"),
        ("beta == 0.0f ? 0.0f : ", ""),
        ("if (alpha == 0.0f) k = 0;", ""),
        ("if (k == 0) alpha = 0.0f;", ""),
    ],
)
def test_the_cases_of_products_find_wrong_indices_and_forbidden_reads(right, wrong):
    built = program.started(PRODUCT.replace(right, wrong) if right else PRODUCT).result()
    tile = Tile(8, 8, 4, 64)
    cases = [
        product_case("product", tile, rung, problem, seed)
        for seed, problem in enumerate(problems(tile, full=False))
    ]
    try:
        found = built.run([case.launch for case in cases]).buffers
    except KernelFault:
        assert right
        return
    assert any(case.wrong(x) for case, x in zip(cases, found, strict=True)) == bool(right)
