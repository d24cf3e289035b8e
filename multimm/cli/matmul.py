"""``multimm matmul A B -o C``: multiply two matrix files into a third."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.options import CLUSTER, DEBUG, PRODUCT, Workers, add, number
from multimm.cli.run import RunError, compute, failed_run
from multimm.cli.terminal import say
from multimm.display.units import duration, flops
from multimm.errors import ClusterError, MemoryBudgetError, OptionError, ShapeError, printable

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

    from multimm.io import Output
    from multimm.planning.hardware import ClusterSpec
    from multimm.planning.plan import MatmulPlan

#: The check holds a few blocks per task in float64, and Dask reads ahead; arbitrary, seen to
#: work with workers of 500 MB.
BLOCKS_PER_WORKER = 32


@click.command(short_help="Multiply two matrices in files, block by block.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "-o",
    "--output",
    metavar="C",
    help="Where to write: .npy, .zarr or .h5. C.h5:/NAME and C.zarr:/NAME add an array to a file.",
)
@add(*PRODUCT)
@click.option("--alpha", type=number, metavar="X", default=1, help="Multiplies the product.")
@add(*CLUSTER)
@click.option("--dataset-a", metavar="NAME", help="Array inside A; A.h5:/NAME says the same.")
@click.option("--dataset-b", metavar="NAME", help="Array inside B.")
@click.option("--dataset-c", metavar="NAME", help="Array inside the output.")
@click.option("--explain", is_flag=True, help="Print the plan and stop.")
@click.option("--verify/--no-verify", default=True, help="Check the written file (default).")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an existing output: the named array, or a file that holds no other.",
)
@DEBUG
def matmul(
    a: str,
    b: str,
    output: str | None,
    dataset_a: str | None,
    dataset_b: str | None,
    dataset_c: str | None,
    explain: bool,
    verify: bool,
    overwrite: bool,
    **options: Any,
) -> None:
    """Multiply the matrices in files A and B (.npy, .zarr, .h5; .nc to read), block by block.

    Both have 2 dimensions: for vectors and stacks call multimm.matmul in Python. Neither the files
    nor the result need to fit in memory. The output gets its name when it is complete and
    verified, and not before.
    """
    product = {name: options.pop(name) for name in PRODUCT_NAMES}
    alpha = product["alpha"]
    if verify and isinstance(alpha, float) and not math.isfinite(alpha):
        raise OptionError(f"--alpha {alpha}: the check needs a finite number; or add --no-verify")
    files = InputFiles(a, b, dataset_a, dataset_b)
    workers = Workers(**options)
    from multimm.io import Output  # takes a second

    files.check(product)
    if explain:
        with workers.open() as client:
            say(files.plan(client, product))
        return
    if output is None:
        raise OptionError("no output: say where to write with -o C.npy, C.zarr or C.h5")
    if overwrite:
        files.check_apart(output, dataset_c)
    # The output is the outer one: it is cleaned up when no worker can write into it any more.
    with (
        Output(output, dataset=dataset_c, overwrite=overwrite) as target,
        workers.open() as client,
    ):
        multiply(client, files, target, product, verify=verify)
        target.commit()
    say(f"written   {printable(target.path)}")


PRODUCT_NAMES = ("alpha", "dtype", "precision", "trans_a", "trans_b", "blocks", "slabs", "p_k")


class InputFiles:
    """The two input files."""

    def __init__(self, a: str, b: str, dataset_a: str | None, dataset_b: str | None) -> None:
        self.paths = ((a, dataset_a), (b, dataset_b))

    def open(self, memory: int | None = None) -> list[da.Array]:
        """Both as lazy arrays, in blocks that a worker with that much memory can check."""
        import dask

        from multimm.io import open_array

        with dask.config.set({"array.chunk-size": block_bytes(memory)}):
            return [open_array(path, dataset=dataset) for path, dataset in self.paths]

    def check(self, product: dict[str, Any]) -> None:
        """Raise what is wrong with the files before any worker is started."""
        import multimm

        arrays = self.open()
        for (path, _), array in zip(self.paths, arrays, strict=True):
            if array.ndim != 2:
                raise ShapeError(f"{path}: shape {array.shape}; a matrix of 2 dimensions is needed")
        with suppress(MemoryBudgetError):  # the workers' memory counts, not this process's
            multimm.plan(*arrays, **product, cluster=multimm.cluster.local())

    def check_apart(self, output: str, dataset: str | None) -> None:
        """Raise where the output would replace one of them: --overwrite is for old results."""
        from multimm.files import locate

        out = locate(output, dataset)
        for name, (path, own) in zip("AB", self.paths, strict=True):
            place = locate(path, own)
            # Other datasets in the same file are kept.
            same = out.dataset is None or place.dataset in (None, out.dataset)
            if same and os.path.realpath(place.path) == os.path.realpath(out.path):
                raise OptionError(
                    f"-o {output}: this is {name} itself, which --overwrite would replace by the "
                    "product; choose another name"
                )

    def plan(self, client: Client, product: dict[str, Any]) -> MatmulPlan:
        """The plan for the client's workers."""
        import multimm

        made: MatmulPlan = multimm.plan(*self.open(described(client).budget_bytes), **product)
        return made


def block_bytes(memory: int | None) -> int:
    """Dask's block size for arrays, or less where workers are small."""
    from multimm.settings import chunk_bytes

    usual = chunk_bytes()
    return usual if memory is None else min(usual, memory // BLOCKS_PER_WORKER)


def described(client: Client) -> ClusterSpec:
    """The client's workers; an error where there are none."""
    from multimm import cluster

    spec = cluster.describe(client)
    if spec is None:
        raise ClusterError("the cluster has no workers: start some, or leave out --scheduler")
    return spec


def multiply(
    client: Client,
    files: InputFiles,
    target: Output,
    product: dict[str, Any],
    *,
    verify: bool,
) -> None:
    """Plan, compute into the unfinished output, and check what was written."""
    import dask

    import multimm

    memory = described(client).budget_bytes
    a, b = files.open(memory)
    plan = multimm.plan(a, b, **product)
    say(f"{plan}\n")
    plan.check()
    written = target.store(multimm.gemm(a=a, b=b, **product))
    _, seconds = compute(client, written, "multiplying", plan)
    rate = f"{flops(plan.flops / seconds)}/s"
    say(f"computed  {duration(seconds)}, {rate}, files read and written included")
    say(f"predicted {duration(plan.seconds)}")
    if verify:
        names = ("alpha", "dtype", "precision", "trans_a", "trans_b")
        said = {name: product[name] for name in names if name in product}
        with failed_run(client), dask.config.set({"array.chunk-size": block_bytes(memory)}):
            result = multimm.verify(a, b, target.open(), **said)
        if not result:
            unseen = "" if result.worst > 1 else " (with --no-verify it is)"
            raise RunError(f"{result}; nothing was written to {target.path}{unseen}")
        say(f"checked   {result}")
