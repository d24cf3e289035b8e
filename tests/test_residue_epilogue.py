"""What byte_mma.cu does with the sums of the tensor cores: its own text, run on the CPU.

The kernel as a whole needs a GPU. What stands behind the products is plain CUDA C++: residues of
the sums, as bytes, and an exchange within four lanes that stores eight of a row at once; or sums
as they are, with what is added to them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from cuda_on_cpu.program import Buffer, KernelFault, Launch, Pointer, started

from multimm.gpu.residues.moduli import COMPLEX, REAL
from multimm.gpu.runtime.kernel_source import kernel_text

pytestmark = pytest.mark.slow

MODULI = sorted({*REAL.moduli, *COMPLEX.moduli})
COLUMNS, ROWS, THREADS = 64, 64, 128  # of the sums of a warpgroup
EXTRA = 24  # bytes between two rows of D, at multiples of 8
#: The kernel's k at most.
LONGEST = 2**15
#: As the tensor cores leave them: a thread has two neighbours in each eight columns, of two rows.
AROUND = """
typedef long long index_t;
constexpr int TILE_N = @COLUMNS, SUMS = TILE_N / 2;
@FUNCTIONS
extern "C" __global__ void epilogue(const int* sums, @PARAMETERS) {
  int own[SUMS];
  const int thread = threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < SUMS; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    own[i] = sums[(row + i / 2 % 2 * 8) * TILE_N + column];
  }
  @STORE
}
"""
#: Faults, of which each has to show: in the residue, in what lanes exchange, in where it is stored.
FAULTS = (
    ("if (r > half) r -= modulus;", ""),
    ("if (r < -half) r += modulus;", ""),
    ("inverse, ROUNDER", "0.999f * inverse, ROUNDER"),
    ("right ? first : second, 2", "right ? first : second, 1"),
    ("odd ? low : high, 1", "odd ? high : low, 1"),
    ("const unsigned of_even = odd ? other : own", "const unsigned of_even = own"),
    ("lower, upper, 0x7632", "lower, upper, 0x5410"),
    ("2 * h;", "h;"),
    ("pairs[2] | pairs[3] << 16", "pairs[3] | pairs[2] << 16"),
    ("8 * h * ldd", "h * ldd"),
    ("8 * (j + q)", "8 * j + q"),
)
#: The same with INTEGER: in what is added, and at the edges of D.
INTEGER_FAULTS = (
    ("if (line >= m) continue;", ""),
    ("+ 8 * h;", "+ 4 * h;"),
    ("} else if (col < n) {", "} else {"),
    ("if (col + 1 < n) d[at + 1]", "d[at + 1]"),
    ("pairs && col < n", "pairs"),
    ("value(sums[i + 1], at + 1)};", "value(sums[i + 1], at)};"),
    ("static_cast<unsigned>(p[at])", "static_cast<unsigned>(p[0])"),
)


def around(functions: str, parameters: str, store: str) -> str:
    """A kernel that stores sums as these functions do."""
    found = AROUND.replace("@COLUMNS", str(COLUMNS)).replace("@FUNCTIONS", functions)
    return found.replace("@PARAMETERS", parameters).replace("@STORE", store)


def text(old: str = "", new: str = "") -> str:
    """The functions behind the products, with a fault in them, and a kernel that calls them."""
    source = kernel_text("byte_mma.cu", {"TILE_N": COLUMNS, "SLOTS": 4, "BAND": 16})
    found = [
        re.search(rf"^__device__ __forceinline__ \w+ {name}\(.*?^}}$", source, re.DOTALL | re.M)[0]
        for name in ("residue", "exchanged", "store")
    ]
    functions = "\n".join(found)
    assert not old or functions.count(old) == 1, f"plant the fault anew: {old}"
    parameters = "unsigned char* d, index_t ldd, int modulus, float inverse"
    store = "store(own, d + row * ldd, ldd, modulus, inverse);"
    return around(functions.replace(old, new), parameters, store)


def sums(modulus: int, seed: int) -> np.ndarray:
    """Some of any size; others half of a modulus, or next to it, beside a multiple of it."""
    rng = np.random.default_rng(seed)
    most = LONGEST * (modulus // 2 + 1 - modulus // 256) ** 2
    made = rng.integers(-most, most + 1, (ROWS, COLUMNS))
    near = rng.random((ROWS, COLUMNS)) < 0.7
    beside = made // modulus * modulus + modulus // 2 + rng.integers(-1, 3, (ROWS, COLUMNS))
    made = np.where(near, beside, made)
    made[rng.random((ROWS, COLUMNS)) < 0.1] //= 2**16
    made[0, :4], made[63, 60:] = (0, most, -most, 1), (-1, modulus, -modulus, most - 1)
    return np.clip(made, -most, most).astype(np.int32)


def wrong(program) -> list[int]:
    """The moduli of which some byte is wrong, or lies elsewhere."""
    ldd, launches, expected = COLUMNS + EXTRA, [], []
    for seed, modulus in enumerate(MODULI):
        whole = sums(modulus, seed)
        before = np.full((ROWS, ldd), 0x55, np.uint8)
        after = before.copy()
        rest = whole % modulus
        after[:, :COLUMNS] = np.where(2 * rest > modulus, rest - modulus, rest) & 255
        expected.append(after)
        arguments = [Pointer(0), Pointer(1), ldd, modulus, float(np.float32(1 / modulus))]
        buffers = [Buffer.of(whole), Buffer.of(before.reshape(-1))]
        launches.append(
            Launch("epilogue", (1, 1, 1), THREADS, arguments, buffers, seed=seed,
                   what=f"residues of {modulus}")
        )  # fmt: skip
    found = program.run(launches).buffers
    return [
        modulus for modulus, (_, d), after in zip(MODULI, found, expected, strict=True)
        if not np.array_equal(d.spans[0].reshape(after.shape), after)
    ]  # fmt: skip


def test_residues_are_those_of_integers_and_lie_where_they_belong():
    assert wrong(started(text()).result()) == []


def test_each_planted_fault_is_found():
    for fault in FAULTS:  # compiled beside each other
        started(text(*fault))
    missed = []
    for fault in FAULTS:
        try:
            if not wrong(started(text(*fault)).result()):
                missed.append(fault)
        except KernelFault:  # stored beyond D, or not aligned
            continue
    assert missed == []


def integer_text(old: str = "", new: str = "") -> str:
    """The struct behind the products of integers, with a fault in it."""
    source = kernel_text("byte_mma.cu", {"TILE_N": COLUMNS, "SLOTS": 4, "BAND": 16, "INTEGER": 1})
    struct = re.search(r"^struct Results \{.*?^\};$", source, re.DOTALL | re.M)[0]
    assert not old or struct.count(old) == 1, f"plant the fault anew: {old}"
    parameters = "index_t m, index_t n, const int* p, int* d, int as_float"
    store = "Results{m, n, p, d, as_float != 0, n % 2 == 0}.store(own, row, 0);"
    return around(struct.replace(old, new), parameters, store)


def wrong_integers(program) -> list[str]:
    """The products of which some sum is wrong, or lies elsewhere."""
    rng = np.random.default_rng(0)
    launches, expected = [], []
    for m, n, has_p, as_float in (
        (64, 64, False, 0), (64, 64, True, 0), (50, 62, True, 1), (9, 7, True, 0),
        (33, 61, False, 1),
    ):  # fmt: skip
        whole, p = (rng.integers(-(2**31), 2**31, size).astype(np.int32)
                    for size in ((ROWS, COLUMNS), (m, n)))  # fmt: skip
        exact = whole[:m, :n].astype(np.int64) + (p if has_p else 0)
        wrapped = exact.astype(np.int32)
        after = wrapped.astype(np.float32).view(np.int32) if as_float else wrapped
        expected.append(after.reshape(-1))
        arguments = [Pointer(0), m, n, Pointer(1) if has_p else None, Pointer(2), as_float]
        buffers = [Buffer.of(whole), Buffer.of(p.reshape(-1)),
                   Buffer.of(np.full(m * n, 0x55555555, np.int32))]  # fmt: skip
        launches.append(Launch("epilogue", (1, 1, 1), THREADS, arguments, buffers,
                               what=f"integers {m} x {n}, {has_p=}, {as_float=}"))  # fmt: skip
    found = program.run(launches).buffers
    return [
        launch.what for launch, (*_, d), after in zip(launches, found, expected, strict=True)
        if not np.array_equal(d.spans[0].view(np.int32), after)
    ]  # fmt: skip


def test_integers_are_stored_within_their_matrix_and_added_modulo_2_to_the_32():
    assert wrong_integers(started(integer_text()).result()) == []


def test_each_planted_fault_of_integers_is_found():
    for fault in INTEGER_FAULTS:
        started(integer_text(*fault))
    missed = []
    for fault in INTEGER_FAULTS:
        try:
            if not wrong_integers(started(integer_text(*fault)).result()):
                missed.append(fault)
        except KernelFault:
            continue
    assert missed == []
