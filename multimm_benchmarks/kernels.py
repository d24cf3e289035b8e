"""Measure the kernels on this machine: python -m multimm_benchmarks.kernels SUITE [--quick]

Prints as it goes, and writes one file per suite to benchmarks/results/ at the end. A quick run is
small, proves that everything works, and is recorded only where --output says.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multimm_benchmarks import records
from multimm_benchmarks.cases import AWKWARD, THIN, Case, square
from multimm_benchmarks.harness import Bench
from multimm_benchmarks.machine import described
from multimm_benchmarks.timing import GpuTimer, HostTimer, NvmlGauge

logger = logging.getLogger("multimm_benchmarks.kernels")  # also where __name__ is __main__

#: In the order of "all". Values: the suite in full, and what a quick one is given instead.
SUITES = (
    "ladder", "ffma", "awkward", "matvec", "transpose", "add", "latency", "split", "wide-range",
    "dtypes", "accuracy", "python",
)  # fmt: skip
#: What a machine without a GPU can measure.
ON_CPU = ("dtypes", "accuracy", "python")


def suites(quick: bool, gpu: bool) -> dict[str, Callable[[Bench], None]]:
    """Return what measures each suite. Without a GPU, those of `ON_CPU` are all there is."""
    from multimm_benchmarks import accuracy_float64, dtypes_on_cpu, python_comparison

    small: dict[str, Any] = {"sizes": (32, 64), "largest_loop": 32, "sweep_size": 64}
    python = functools.partial(python_comparison.measure, gpu=gpu, **(small if quick else {}))
    double: dict[str, Any] = (
        {"side": 4096 if gpu else 64, "depths": (2048,), "depth": 2048} if quick else {}
    )
    accurate = functools.partial(accuracy_float64.measure, gpu=gpu, **double)
    if not gpu:
        sizes: dict[str, Any] = (
            {"integer_sizes": (64, 200), "float64_sizes": (64,), "wide_sizes": (128,)}
            if quick
            else {}
        )
        dtypes_here = functools.partial(dtypes_on_cpu.measure, **sizes)
        return {"dtypes": dtypes_here, "accuracy": accurate, "python": python}
    from multimm_benchmarks import (
        accuracy,
        dtypes,
        latency,
        matvec,
        products,
        split,
        sums,
        transposes,
        wide_range,
    )

    tiny: dict[str, dict[str, Any]] = {
        "ladder": {"n": 512},
        "ffma": {"sizes": (512,), "sustained": ()},
        "awkward": {"cases": [case for case in AWKWARD if case.flops < 2e9]},
        "matvec": {"cases": [case for case in THIN if case.k < 32768]},
        "transpose": {"shapes": ((1024, 1024), (1009, 1013))},
        "add": {"shapes": ((1024, 1024), (1009, 1013)), "counts": (2, 3)},
        "latency": {"sizes": (32, 64), "rounds": 3},
        "split": {
            "squares": (square(1024),),
            "cases": (Case(1024, 1024, 1024, extra=1),),
            "sustained": (),
            "packs": (1024,),
        },
        "wide-range": {"cases": (("exponents 2^40", 1024),)},
        "dtypes": {"complex_sizes": (4096,), "integer_sizes": (1024,), "float64_sizes": (4096,)},
        "accuracy": {"depths": (256, 1024), "depth": 1024},
    }
    full: dict[str, Callable[..., None]] = {
        "ladder": products.ladder, "ffma": products.ffma, "awkward": products.awkward,
        "matvec": matvec.measure, "transpose": transposes.measure, "add": sums.measure,
        "latency": latency.measure, "split": split.measure,
        "wide-range": wide_range.measure, "dtypes": dtypes.measure, "accuracy": accuracy.measure,
    }  # fmt: skip
    chosen = {name: functools.partial(suite, **(tiny[name] if quick else {}))
              for name, suite in full.items()}  # fmt: skip
    return {**chosen, "accuracy": _in_turn(chosen["accuracy"], accurate), "python": python}


def _in_turn(*suites: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """One suite of several."""

    def measure(bench: Bench) -> None:
        for suite in suites:
            suite(bench)

    return measure


def gpu_found() -> bool:
    """Whether CuPy is installed and finds a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device: each with an error of its own
        return False


def of_this_gpu() -> dict[str, Any]:
    """Return what records of kernels say beside: of libraries, and of the GPU that CuPy has."""
    import cupy
    import pynvml

    from multimm_benchmarks.cublas import Cublas

    pynvml.nvmlInit()
    chip = cupy.cuda.runtime.getDeviceProperties(0)
    handle = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device().pci_bus_id)
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "gpu": chip["name"].decode(), "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "cublas": Cublas(cupy.cuda.Stream.null).version,
        "watts_allowed": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    }  # fmt: skip


def bench_for(quick: bool, gpu: bool) -> Bench:
    """Return how to measure here."""
    if not gpu:
        return Bench(HostTimer(), rounds=2 if quick else 3, sustained=0)
    import cupy

    events = GpuTimer(graphs=False)
    gauge = NvmlGauge(cupy.cuda.Device().pci_bus_id)
    if quick:
        return Bench(GpuTimer(), events, rounds=2, target=0.002, sustained=0, gauge=gauge)
    return Bench(GpuTimer(), events, gauge=gauge)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    prog = "python -m multimm_benchmarks.kernels"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("suite", choices=(*SUITES, "all"))
    parser.add_argument("--quick", action="store_true", help="toy sizes, few repetitions")
    parser.add_argument("--output", type=Path, help="the folder of the records")
    given = parser.parse_args(arguments)
    print_log()
    gpu = gpu_found()
    available = suites(given.quick, gpu)
    wanted = SUITES if given.suite == "all" else (given.suite,)
    if given.suite not in available and given.suite != "all":
        only = ", ".join(ON_CPU)
        parser.error(f"{given.suite} needs CuPy and an NVIDIA GPU; here are only: {only}")
    folder = given.output or (None if given.quick else records.RESULTS)
    machine = described(1) | of_this_gpu() if gpu else described(0)
    header = records.run_header(machine) if folder else None
    failed = 0
    for name in wanted:
        if name not in available:
            logger.info("%s left out: it needs CuPy and an NVIDIA GPU", name)
            continue
        bench = bench_for(given.quick, gpu)
        try:
            available[name](bench)
        except Exception:  # the other suites have not failed; half a suite is not recorded
            logger.exception("%s failed", name)
            failed += 1
            if given.output and header and bench.records:  # for whoever looks for the reason
                records.save(bench.records, header, f"failed-{name}", given.output)
            continue
        if folder and header:
            logger.info("recorded in %s", records.save(bench.records, header, name, folder))
    return min(failed, 1)


def print_log() -> None:
    """Print what the benchmarks log, and no library's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("multimm_benchmarks").handlers[:] = [handler]
    logging.getLogger("multimm_benchmarks").setLevel(logging.INFO)


if __name__ == "__main__":
    raise SystemExit(main())
