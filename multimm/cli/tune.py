"""``multimm tune``: find the fastest kernel configurations of this GPU, or a cluster's rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.options import CLUSTER, DEBUG, Workers, add
from multimm.cli.terminal import console, say
from multimm.errors import KernelError, OptionError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from multimm.cluster.calibration.store import Rates
    from multimm.gpu.tuning.autotune import Case, Outcome

SHAPES = "512x512x512,1024x1024x1024,2048x2048x2048,4096x4096x4096,8192x8192x8192"


@click.command()
@click.option("--shapes", default=SHAPES, metavar="MxNxK,...", help="Sizes.", show_default=True)
@click.option(
    "--transposes",
    default="nn,nt,tn,tt",
    show_default=True,
    help="How A and B are stored: n as they are, t transposed.",
)
@click.option("--device", default=0, show_default=True, help="CUDA device of this process.")
@click.option("--seconds", default=1.0, show_default=True, help="Measured per shape and transpose.")
@click.option("--cluster", is_flag=True, help="Measure workers and links in place of kernels.")
@add(*CLUSTER)
@DEBUG
def tune(
    shapes: str, transposes: str, device: int, seconds: float, cluster: bool, **options: Any
) -> None:
    """Time the kernel configurations on this GPU and keep the fastest for products on one GPU.

    Every configuration is checked first, and only those with the default's very bits compete:
    results stay the same, on every GPU. The winners are kept per GPU model in the user's cache
    (MULTIMM_CACHE_DIR names another place).

    With --cluster: the rates of block products and of blocks that travel, measured on workers that
    --gpus, --workers or --scheduler name. Later plans for such workers are made from them.
    """
    workers = Workers(**options)
    if cluster:
        return tune_cluster(workers)
    if workers != Workers():
        raise OptionError("options about workers are for --cluster: give it as well")
    cases = parse(shapes, transposes)
    if not seconds > 0:
        raise OptionError(f"--seconds {seconds}: more than 0 is needed")
    _check_device(device)

    from multimm.gpu.runtime.launch import device_of
    from multimm.gpu.simt.configs import choose
    from multimm.gpu.tuning import autotune
    from multimm.gpu.tuning.bench import GpuBench

    out = console()
    outcomes = []
    with out.status("tuning") as status:
        for i, case in enumerate(cases):
            status.update(f"{case} ({i + 1} of {len(cases)})")
            default, _ = choose(case.sizes, device_of(device))
            configs = autotune.candidates(default, device_of(device))
            bench = GpuBench(case, device, configs)
            outcomes.append(autotune.tune(case, list(configs), bench, seconds))
    out.print(report(outcomes))
    path = autotune.save(autotune.model_of(device), outcomes)
    say(f"kept in {printable(path)}" if path else "the winners could not be kept: see the log")
    if wrong := [str(one.case) for one in outcomes if one.default.reason]:
        raise KernelError(f"wrong results for {', '.join(wrong)}: please report this")


def tune_cluster(workers: Workers) -> None:
    """Measure idle workers and keep what they reach."""
    from multimm.cluster.calibration import store
    from multimm.cluster.calibration.run import measure_rates

    with workers.open() as client:
        found = measure_rates(client)
    for line in rate_lines(found):
        say(line)
    path = store.keep(found)
    say(f"kept in {printable(path)}" if path else "the rates could not be kept: see the log")


def rate_lines(found: Rates) -> Iterator[str]:
    """A line for each kind of worker and each way between them."""
    for device in found.devices:
        rates = dict(device.packed_gflops)
        packed = "".join(f", {name} {rate:.4g}" for name, rate in rates.items())
        yield (
            f"{device.name}: ieee {device.gflops:.4g} GFLOP/s "
            f"(shipped {device.shipped_gflops:.4g}){packed}"
        )
    for link in found.links:
        where = "between hosts" if link.between else "within a host"
        yield (
            f"{link.protocol} {where}: {link.gbps:.3g} GB/s to every worker at once, "
            f"{link.pair_gbps:.3g} GB/s for a pair alone, {link.latency_s * 1e6:.0f} us at least"
        )


def parse(shapes: str, transposes: str) -> list[Case]:
    """Every shape with every way to store the operands."""
    from multimm.gpu.tuning.autotune import Case

    cases = []
    for shape in shapes.split(","):
        match = re.fullmatch(r"\s*(\d+)[xX](\d+)[xX](\d+)\s*", shape)
        if match is None or min(sizes := [int(size) for size in match.groups()]) < 1:
            raise OptionError(f"--shapes {shape!r}: M, N and K as in 4096x4096x1024, at least 1")
        for letters in transposes.split(","):
            if not re.fullmatch(r"\s*[nt][nt]\s*", letters):
                raise OptionError(f"--transposes {letters!r}: allowed are nn, nt, tn and tt")
            sides = [letter == "t" for letter in letters.strip()]
            cases.append(Case(sizes[0], sizes[1], sizes[2], sides[0], sides[1]))
    return cases


def _check_device(device: int) -> None:
    from multimm.cluster.inspect.devices import visible_gpus

    count = len(visible_gpus())
    if count == 0:
        raise KernelError("there is no GPU to tune for: multimm doctor says what was found")
    if not 0 <= device < count:
        raise OptionError(f"--device {device}: this process sees devices 0 to {count - 1}")


def report(outcomes: list[Outcome]) -> Table:
    """One line per product; rates in TFLOP/s."""
    from rich.table import Table

    table = Table("product", "default", "TFLOP/s", "winner", "TFLOP/s", "gain", "left out")
    for outcome in outcomes:
        case, default, winner = outcome.case, outcome.default, outcome.winner
        flops = 2 * math.prod(case[:3])
        left_out = [f"{one.name}: {one.reason}" for one in outcome.timings if one.reason]
        table.add_row(
            str(case),
            default.name,
            f"{flops / default.seconds / 1e12:.2f}",
            winner.name,
            f"{flops / winner.seconds / 1e12:.2f}",
            f"{default.seconds / winner.seconds - 1:+.1%}",
            "; ".join(left_out),
        )
    return table
