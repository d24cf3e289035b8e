"""Products on more workers than there are GPUs: python -m multimm_benchmarks.rehearsal --workers 8

A product takes what its kernels take, which one GPU tells, and what planning, the scheduler, tasks
and transfers add to that, which depends on the number of workers. The latter can be had on fewer
GPUs: several workers share one, and a block product waits for as long as the plan says that it
takes. All else is done in earnest: graphs, tasks, memory, packing, and transfers between processes.

So the result is no product, and nothing is verified or called a rate. What is packed and what
travels takes longer than it would on as many GPUs, for workers share the memory and the links of
theirs. Without GPUs the workers are CPU workers: that it works is all that shows.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from multimm.cluster.inspect.devices import visible_gpus
from multimm.errors import OptionError
from multimm.gpu.kernel_selection import SINGLE, Precision
from multimm.planning.cost import time as cost_time
from multimm.planning.plan import MatmulPlan
from multimm_benchmarks import records
from multimm_benchmarks.agenda import machine_of
from multimm_benchmarks.kernels import print_log
from multimm_benchmarks.machine import described
from multimm_benchmarks.peers.base import timed
from multimm_benchmarks.peers.ours import Multimm
from multimm_benchmarks.records import Record
from multimm_benchmarks.report.runs import REHEARSAL
from multimm_benchmarks.shared_gpus import shared_gpus
from multimm_benchmarks.sweep_cases import KINDS, SIZES, Product, chosen, products

SYSTEM = "multimm, kernels wait"
#: Operands in host memory would all pass the links of the few GPUs that there are.
REHEARSED = tuple(kind for kind in KINDS if kind != "host")
#: Of the memory of all GPUs, what a product may take.
MEMORY = 0.9

logger = logging.getLogger("multimm_benchmarks.rehearsal")  # also where __name__ is __main__


class Rehearsal(Multimm):
    """multimm, whose block products wait."""

    drawn = REHEARSED

    def started(self) -> AbstractContextManager[Any]:
        """Return a client of workers that share the GPUs."""
        return shared_gpus(self.machine.workers) if self.gpu else super().started()

    def prepare(self, product: Product, precision: Precision) -> None:
        """Plan; block products wait from now on."""
        super().prepare(product, precision)
        plan = self._planned(product, precision)
        device = plan.cluster.slowest
        rate = 1e9 * cost_time.product_gflops(plan.layout.problem, device)
        self.client.run(wait_instead, rate, 1e9 * device.copy_gbps)

    def _ideal(self, precision: Precision) -> float:
        return 0.0  # no kernel runs

    def plan(self, product: Product, precision: Precision) -> MatmulPlan:
        """What is rehearsed."""
        return self._planned(product, precision)


def wait_instead(rate: float, copy: float) -> None:
    """Runs on a worker: from now on its block products wait.

    Parameters
    ----------
    rate : float
        Operations per second.
    copy : float
        Bytes per second that the device reads and writes, for operands that a product packs.
    """
    import numpy as np

    from multimm.gpu.arrays import is_cupy
    from multimm.graph.lowering import symmetric
    from multimm.graph.tasks import multiply
    from multimm.planning.tiling.triangle import computed

    def rows_and_k(block: Any, turned: bool) -> tuple[int, int]:
        if multiply.is_packed(block):
            return block.rows, block.k
        rows, k = block.shape[:: -1 if turned else 1]
        return rows, k

    def gemm(a: Any, b: Any, *addends: Any, step: Any, lower: bool = False, **_: Any) -> Any:
        (m, k), (n, _k) = rows_and_k(a, step.trans_a), rows_and_k(b, not step.trans_b)
        on_gpu = multiply.is_packed(a) or is_cupy(a)
        packs = on_gpu and step.precision != "ieee"
        loose = sum(x.nbytes for x in (a, b) if packs and not multiply.is_packed(x))
        elements = computed(m, step.accumulate) if lower else m * n
        if on_gpu:
            import cupy as xp
        else:
            xp = np
        result = xp.empty((m, n), step.dtype)
        time.sleep(2 * k * elements / rate + 2 * cost_time.WITHIN_BYTES * loose / copy)
        return result

    for module in (multiply, symmetric):  # each has the name of its own
        vars(module)["gemm"] = gemm


def rehearse(
    system: Rehearsal, product: Product, precision: Precision, repeats: int, gpus: int
) -> Record:
    """Run a product some times, the first time included, and return its record."""
    system.prepare(product, precision)
    runs = []
    for seed in range(repeats):
        _, run = timed(system, system.operands(product, precision, seed), precision)
        runs.append(run)
    last = (run.start, run.start + run.seconds)
    facts, seconds = system.facts(product, precision, last), [run.seconds for run in runs]
    detail = {"workers": system.machine.workers, "gpus": gpus, **facts["detail"]}
    del detail["one_worker_tflops"]
    more = {key: facts[key] for key in ("bytes_received", "bytes_predicted", "plan")}
    shape = (product.m, product.n, product.k)
    return records.record(
        product.name, SYSTEM, shape, seconds, timing="host", precision=precision, detail=detail,
        **more,
    )  # fmt: skip


def too_large(plan: MatmulPlan, product: Product, gpus: int) -> str:
    """Why a product cannot be rehearsed on so many GPUs; empty where it can."""
    if not gpus:
        return ""
    packed = sum(v for name, v in plan.spill_terms.items() if name.startswith("packed"))
    need = product.bytes + plan.bytes_received + plan.cluster.workers * packed
    have = MEMORY * sum(gpu.memory_bytes for gpu in visible_gpus())
    if need <= have:
        return ""
    return f"needs {need / 1e9:.3g} GB, and {gpus} GPUs may give {have / 1e9:.3g} GB"


def line(record: Record) -> str:
    """One line about a record."""
    detail, seconds = record["detail"], record["seconds"]
    return (
        f"{record['case']}, {record['precision']}, {detail['workers']} workers: "
        f"{record['median']:.4g} s, {record['median'] / detail['predicted_seconds']:.3f} x "
        f"predicted, slowest {max(seconds) / record['median']:.3f} x, first task after "
        f"{1e3 * detail['first_task_s']:.1f} ms of {detail['tasks']} tasks"
    )


def rehearsals(
    workers: int, kinds: Sequence[str], precisions: Sequence[Precision], repeats: int, quick: bool
) -> Iterator[Record]:
    """Records of all products that these GPUs can hold."""
    gpus = len(visible_gpus())
    device = "gpu" if gpus else "cpu"
    system = Rehearsal(machine_of(device, workers, quick))
    with system.opened():
        for product in products(SIZES[device, quick], workers, kinds):
            for precision in precisions[:1] if product.repeats else precisions:
                if why := too_large(system.plan(product, precision), product, gpus):
                    logger.info("%s, %s: %s", product.name, precision, why)
                    continue
                runs = product.repeats or repeats
                yield rehearse(system, product, precision, runs, gpus)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    prog = "python -m multimm_benchmarks.rehearsal"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--workers", type=int, default=8, help="how many share the GPUs")
    parser.add_argument("--cases", help=f"some of {','.join(REHEARSED)}")
    parser.add_argument("--precisions", help=f"some of {','.join(SINGLE)}")
    parser.add_argument(
        "--repeats", type=int, default=10, help="runs of a case, the first included"
    )
    parser.add_argument("--quick", action="store_true", help="small cases; recorded by --output")
    parser.add_argument("--output", type=Path, help="the folder of the records")
    given = parser.parse_args(arguments)
    gpus = len(visible_gpus())
    try:
        kinds = chosen(given.cases, REHEARSED, "case")
        precisions = chosen(given.precisions, SINGLE if gpus else SINGLE[:1], "precision")
    except OptionError as error:
        parser.error(str(error))
    if min(given.workers, given.repeats) < 1:
        parser.error(f"{given.workers} workers, {given.repeats} repeats: at least 1 is needed")
    print_log()
    folder = given.output or (None if given.quick or not gpus else records.RESULTS)
    header = records.run_header(described()) if folder else None
    found = []
    try:
        for record in rehearsals(given.workers, kinds, precisions, given.repeats, given.quick):
            logger.info("%s", line(record))
            found.append(record)
    finally:  # what is done stays, whatever a later case dies of
        if folder and header and found:
            logger.info("recorded in %s", records.save(found, header, REHEARSAL, folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
