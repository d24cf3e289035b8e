"""Products on the tensor cores, packing included or done before, beside cuBLAS and our own FP32."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from multimm_benchmarks.cases import AWKWARD, Case, square
from multimm_benchmarks.cublas import COMPUTE_TF32, Cublas
from multimm_benchmarks.harness import Bench, Errors, Reference, U, WrongResultError, operands
from multimm_benchmarks.records import Record
from multimm_benchmarks.timing import Call, GpuTimer
from multimm_benchmarks.transposes import copy

Array = Any

SQUARES = (*(square(n) for n in (1024, 2048, 4096, 8192, 16384)), square(8192, "TT"))
SUSTAINED = (square(8192), square(16384))
#: From so many rows, columns and k on, the tensor cores must be chosen.
LARGE, LONG = 1024, 256
#: Of the awkward list, what fills the tensor cores.
CASES = tuple(
    case for case in AWKWARD if not case.batch and min(case.m, case.n) >= 1024 and case.k >= 256
)
#: Sides of the matrices that are packed alone.
PACKS = (8192, 16384)

SGEMM = ("cublas sgemm", "cublas lt")
#: Configurations of the kernel for GPUs without wgmma, on operands packed before.
_MMA = {"float32": "mma_wide", "tf32": "tf32_mma_wide"}
#: Packing has to read an element and to write its parts; a long k is read twice.
_PACKED_BYTES = {"float32": 4 + 4, "tf32": 4 + 2}
#: How far unpacked elements may be from what they were, relative to themselves.
_PACKED_ERROR = {"float32": 2.0**-21, "tf32": 2.0**-10}


class System(NamedTuple):
    """What computes a product."""

    call: Call
    precision: str
    kernel: str | None = None  #: of ours, the one that must run, if one must
    chosen: bool = False  #: whether multimm chooses the kernel by itself


def measure(
    bench: Bench,
    squares: Sequence[Case] = SQUARES,
    cases: Sequence[Case] = CASES,
    sustained: Sequence[Case] = SUSTAINED,
    packs: Sequence[int] = PACKS,
) -> None:
    """Record squares in all precisions, awkward cases in FP32, and packing alone."""
    assert isinstance(bench.timer, GpuTimer)
    library = Cublas(bench.timer.stream)
    for case in squares:
        _product(bench, library, f"split {case.m} {case.transposes}", case,
                 everything=True, steady=case in sustained)  # fmt: skip
    for case in cases:
        _product(bench, library, f"split {case.name}", case, everything=False, steady=False)
    for n in packs:
        _packing(bench, n)


def _product(
    bench: Bench, library: Cublas, name: str, case: Case, *, everything: bool, steady: bool
) -> None:
    """Verify, time in turns, and record one product by all systems."""
    import cupy

    assert isinstance(bench.timer, GpuTimer), "cuBLAS is compared on a GPU, by a GpuTimer"
    placed = operands(cupy, case)
    systems = _ours(case, *placed, tf32=everything) | _cublas(library, case, *placed, everything)
    reference = Reference(cupy, case, *placed[:2])
    with bench.timer.stream:
        verified = {
            system: _verified(reference, name, case, system, given, placed[2])
            for system, given in systems.items()
        }
    del reference
    runs = bench.compare({system: given.call for system, given in systems.items()})
    medians = {system: timed.median for system, timed in runs.items()}
    lasting = _lasting(bench, case, systems, medians) if steady else {}
    for system, timed in runs.items():
        precision, (errors, kernel) = systems[system].precision, verified[system]
        bench.add(name, system, (case.m, case.n, case.k), timed, flops=case.flops,
                  precision=precision, ratio_vs=ratios(system, precision, medians), detail=kernel,
                  sustained=lasting.get(system), **errors.recorded())  # fmt: skip


def _ours(case: Case, a: Array, b: Array, out: Array, *, tf32: bool) -> dict[str, System]:
    """Ours: packing included, packed before, and that for other tensor cores than Hopper's."""
    from multimm.gpu.emulated.pack import pack
    from multimm.gpu.kernel_selection import FFMA, SPLIT
    from multimm.gpu.product import gemm

    product = functools.partial(gemm, a, b, trans_a=case.trans_a, trans_b=case.trans_b, out=out)
    systems: dict[str, System] = {}
    for name, precision in {"multimm": "float32", "multimm tf32": "tf32"}.items():
        if precision == "tf32" and not tf32:
            continue
        whole = functools.partial(product, precision=precision)
        packed = (pack(a, side="a", trans=case.trans_a, scheme=precision),
                  pack(b, side="b", trans=case.trans_b, scheme=precision))  # fmt: skip
        before = functools.partial(gemm, *packed, out=out)
        large = min(case.m, case.n) >= LARGE and case.k >= LONG
        must = SPLIT if large else None
        systems[name] = System(whole, precision, must, chosen=True)
        systems[f"{name} packed before"] = System(before, precision, SPLIT, chosen=True)
        if tf32:  # where everything is wanted: what GPUs without wgmma run
            other = functools.partial(gemm, *packed, out=out, config=_MMA[precision])
            systems[f"{name} by mma"] = System(other, precision)
    ieee = functools.partial(product, precision="ieee")
    return systems | {"multimm ieee": System(ieee, "ieee", FFMA, chosen=True)}


def _cublas(
    library: Cublas, case: Case, a: Array, b: Array, out: Array, everything: bool
) -> dict[str, System]:
    calls = dict(zip(SGEMM, (library.sgemm(case, a, b, out), library.lt(case, a, b, out)),
                     strict=True))  # fmt: skip
    systems = {name: System(call, "ieee") for name, call in calls.items() if call is not None}
    if everything:
        half_a, half_b = a.astype("float16"), b.astype("float16")
        tf32 = library.gemm_ex(case, a, b, out, COMPUTE_TF32)
        systems["cublas tf32"] = System(tf32, "tf32")
        systems["cublas fp16"] = System(library.gemm_ex(case, half_a, half_b, out), "fp16")
    return systems


def _verified(
    reference: Reference, name: str, case: Case, system: str, given: System, out: Array
) -> tuple[Errors, str | None]:
    """Compare a product, and what chose its kernel must have chosen the right one; return both."""
    from multimm.gpu.kernel_selection import last_choice

    # Two factors with 11 significant bits each; that is what rounding to FP16 leaves as well.
    coarse = 2.0**-9 + 2 * case.k * U if given.precision in ("tf32", "fp16") else None
    errors = reference.check(out, given.call, coarse)
    choice = last_choice() if given.chosen else None
    ran = choice.kernel if choice else None
    if given.chosen and ran != (given.kernel or ran):
        raise WrongResultError(f"{name}: {system} ran {choice}, not {given.kernel}")
    return errors, ran


def ratios(system: str, precision: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return how many times as fast as its peers a system is.

    Parameters
    ----------
    system, precision : str
    seconds : mapping of str to float
        Of one call, by system.

    Returns
    -------
    dict of str to float
        "cublas" is the better of its two ways in FP32. For ours in FP32, "a third of cublas fp16"
        is what three products of FP16 parts would take if nothing else took time.
    """
    peers = {"cublas": min(seconds[peer] for peer in SGEMM if peer in seconds)}
    if system.startswith("multimm"):
        if precision == "float32":
            peers["multimm ieee"] = seconds.get("multimm ieee", 0)
            peers["a third of cublas fp16"] = 3 * seconds.get("cublas fp16", 0)
        if precision == "tf32":
            peers["cublas tf32"] = seconds.get("cublas tf32", 0)
    return {peer: round(took / seconds[system], 4) for peer, took in peers.items() if took}


def _lasting(
    bench: Bench, case: Case, systems: Mapping[str, System], medians: Mapping[str, float]
) -> dict[str, Record | None]:
    """Return sustained figures: of ours, and of the best way into cuBLAS in each precision."""
    slower = max(SGEMM, key=lambda peer: medians.get(peer, float("inf")))
    lasting = {
        system: bench.steady(given.call, case.flops)
        for system, given in systems.items()
        if system not in (slower, "multimm ieee")
    }
    found = {system: figures for system, figures in lasting.items() if figures is not None}
    seconds = {system: case.flops / (1e12 * figures["tflops"]) for system, figures in found.items()}
    for system, figures in found.items():
        figures["ratio_vs"] = ratios(system, systems[system].precision, seconds)
    return lasting


def _packing(bench: Bench, n: int) -> None:
    """Record packing of an n x n operand that lies along k, and of one that lies across."""
    import cupy

    from multimm.gpu.emulated.pack import pack

    a = cupy.random.default_rng(0).standard_normal((n, n), dtype=cupy.float32)
    same = cupy.empty_like(a)
    calls: dict[str, Call] = {"copy": functools.partial(copy, same, a)}
    moved, precisions = {"copy": 2 * a.nbytes}, {"copy": "ieee"}
    for scheme, size in _PACKED_BYTES.items():
        for order, trans in (("along k", False), ("across k", True)):
            name = f"multimm {scheme}, {order}"
            operand = a.T if trans else a
            off = abs(pack(a, side="a", trans=trans, scheme=scheme).unpack() - operand)
            if not bool((off <= _PACKED_ERROR[scheme] * abs(operand)).all()):
                raise WrongResultError(f"{name}: an operand of {a.shape} is packed wrongly")
            calls[name] = _launch_of(a, trans, scheme)
            moved[name], precisions[name] = size * a.size, scheme
    cupy.cuda.Device().synchronize()
    runs = bench.compare(calls, graphs=False)
    copied = moved["copy"] / runs["copy"].median
    for name, timed in runs.items():
        ratio = moved[name] / timed.median / copied
        bench.add(f"split pack {n}", name, (n, n), timed, moved=moved[name],
                  precision=precisions[name], ratio_vs={"copy": round(ratio, 4)})  # fmt: skip


def _launch_of(a: Array, trans: bool, scheme: str) -> Call:
    """Packing alone, without looking at what it has counted."""
    import cupy

    from multimm.gpu.emulated.pack import prepared, source_of

    _, source = source_of(a, "a", trans)
    packing = prepared([source], scheme, a.device.id)
    head = cupy.empty(packing.head_bytes, "u1")
    tiles = cupy.empty(source.tile_shape(scheme), "f2")
    exponents = cupy.empty(source.height, "i4")

    def launch() -> None:
        packing(head.data.ptr, [(a.data.ptr, tiles.data.ptr, exponents.data.ptr)])

    return launch
