"""``multimm bench``: how fast products are here, over worker counts and beside other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from multimm.cli.options import DEBUG
from multimm.cli.run import RunError
from multimm.cli.terminal import console, say
from multimm.errors import printable

#: Characters of a line of the table, where output goes to a file.
WIDTH = 160


@click.command(short_help="Time products, beside other systems.")
@click.option("--gpus", metavar="N,...", help="GPU counts. Default: 1,2,4,8 as far as there are.")
@click.option("--workers", metavar="N,...", help="Counts of CPU workers instead of GPUs.")
@click.option(
    "--cases", metavar="NAME,...", help="strong, weak, tall, rectangular, chunked, host, steady."
)
@click.option("--peers", metavar="NAME,...", help='Systems to compare with; "none". Default: all.')
@click.option(
    "--precisions",
    metavar="NAME,...",
    help="float32, ieee, tf32, float64. Default: float32's on GPUs, else float32; float64 by name.",
)
@click.option("--repeats", type=int, metavar="N", help="Timed runs of each case.")
@click.option("--longest", type=float, metavar="SECONDS", help="Leave out longer runs.")
@click.option("--quick", is_flag=True, help="Small cases: a verdict in two minutes.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of the records. Default: benchmarks/results in a checkout, multimm-records "
    "elsewhere; with --quick none.",
)
@click.option("--restart", is_flag=True, help="Give up an unfinished sweep instead of going on.")
@click.option("--close", is_flag=True, help="Record an unfinished sweep as it is, and end.")
@DEBUG
def bench(output: Path | None, restart: bool, close: bool, **options: Any) -> None:
    """Time products on more and more workers, and other systems on the same machine.

    Every product is verified before it is timed. After an interruption the same command goes on,
    and --close, with no other option than --output, records what there is: for what it lacks it
    says that it was interrupted. With --quick, what two minutes are too short for is left out, and
    counted in the verdict. Exit code 1 if a product is wrong or a case failed.
    """
    from multimm_benchmarks import agenda, harness, records, scaling, unfinished, verdict

    out = console(WIDTH)
    path: Path | None
    if close:
        found, path = unfinished.close(output or records.RESULTS)
    else:
        asked = agenda.ask(**options)
        folder = output or (None if asked.quick else records.RESULTS)
        try:
            found, path = scaling.sweep(asked, folder, out, restart=restart)
        except harness.WrongResultError as error:
            raise RunError(f"a product is wrong, and nothing is recorded: {error}") from error
    out.print(verdict.table(found))
    for sentence in verdict.verdict(found):
        say(sentence)
    if path:
        say(f"recorded in {printable(path)}")
    if not close and (failed := verdict.failed(found)):
        raise RunError(f"{len(failed)} of multimm's cases failed: the table says why")
