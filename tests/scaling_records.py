"""Made-up records of the suite `scaling`, written as a sweep writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multimm_benchmarks import records

COUNTS = (1, 2, 4, 8)
#: TFLOP/s of one GPU: (system, precision) -> rate, rms error, relative error.
SYSTEMS = {
    ("multimm", "float32"): (175.0, 0.06, 2e-7),
    ("multimm", "ieee"): (53.0, 0.4, 1.5e-6),
    ("multimm", "tf32"): (520.0, 60.0, 3e-4),
    ("dask.array", "float32"): (45.0, 0.5, 1.6e-6),
    ("jax highest", "float32"): (52.0, 0.5, 1.6e-6),
    ("jax default", "tf32"): (600.0, 70.0, 3.4e-4),
}
#: m, n and k; without them the memory of each GPU is the same.
SHAPES = {
    "strong square 32768": (32768,) * 3,
    "strong square 65536": (65536,) * 3,
    "weak square 32768 per GPU": None,
    "tall AtA 1048576 x 8192": (8192, 8192, 1048576),
    "steady square 32768": (32768,) * 3,
}
SCALING = {"tall": "strong", "steady": ""}
TIMELINE = [
    [worker, start, start + 0.1, kind]
    for worker in ("0", "1", "10")
    for start, kind in ((0.0, "pack"), (0.1, "multiply"), (0.15, "transfer"), (0.3, "dream"))
]


#: What is known of Dask's tasks.
STARTED = {"tasks": 48, "first_task_s": 0.0171}


def entry(case: str, system: str, precision: str, workers: int, **detail: Any) -> records.Record:
    """One product that ran."""
    m, n, k = SHAPES[case] or (round(32768 * workers**0.5),) * 3
    kind = case.split()[0]
    rate, rms, relative = SYSTEMS.get((system, precision), (53.0, 0.5, 1.6e-6))
    reached = rate * workers * 0.97 ** (workers - 1)
    moved = 4 * m * n * (workers - 1) if workers > 1 else None
    ours = system == "multimm"
    return records.record(
        case, system, (m, n, k), [2 * m * n * k / reached / 1e12] * 3, flops=2 * m * n * k,
        precision=precision, rms_u=rms, rel_error=relative, componentwise_u=10 * rms,
        bytes_received=moved and 1.02 * moved, bytes_predicted=moved if ours else None,
        peak_bytes=3 * 4 * m * n // workers,
        detail={
            "workers": workers, "device": "gpu", "scaling": SCALING.get(kind, kind),
            "status": "done",
            "predicted_seconds": 2 * m * n * k / reached / 1.1e12 if ours else None,
            "one_worker_tflops": rate * workers if ours else None, "config": f"{system} as it is",
            **(STARTED if system in ("multimm", "dask.array") else {}),
            **detail,
        },
    )  # fmt: skip


def without_result(case: str, system: str, workers: int, status: str, reason: str) -> Any:
    """One product that failed, or whose system is absent."""
    return {
        "case": case, "system": system, "shape": [8, 8, 8], "precision": "float32", "seconds": [],
        "detail": {"workers": workers, "device": "gpu", "scaling": case.split()[0],
                   "status": status, "reason": reason},
    }  # fmt: skip


def swept(device: str = "gpu") -> list[records.Record]:
    """Strong and weak scaling of all systems, one failure, one absence, one timeline."""
    made = [
        entry(case, system, precision, workers, device=device,
              **({"timeline": TIMELINE} if workers == 8 and precision == "ieee" else {}))
        for case in list(SHAPES)[:4] for workers in COUNTS for system, precision in SYSTEMS
    ]  # fmt: skip
    case = "strong square 65536"
    made += [entry(one, "cupy", "float32", 1, device=device) for one in list(SHAPES)[:2]]
    made.append(entry("steady square 32768", "multimm", "float32", 8, device=device,
                      slowest_over_median=1.1))  # fmt: skip
    made.append(without_result(case, "cublasxt", 1, "absent", "libcublas is | not\nthere"))
    made.append(without_result(case, "numpy", 1, "failed", "out of memory"))
    return made


GPUS = {"gpu": "toy", "count": 8}
CPUS = {"gpu": None, "count": 0, "cpu": "x86_64", "cores": 2}


def save(
    folder: Path,
    made: list[records.Record],
    date: str = "2026-01-01T00:00:00Z",
    machine: Any = GPUS,
) -> Path:
    """Write them as one run on a machine; MULTIMM_COMMIT names the commit."""
    header = records.run_header(machine) | {"date": date}
    return records.save(made, header, "scaling", folder)
