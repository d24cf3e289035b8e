"""``multimm plan A B``: the dry run, for shapes or files, without any worker."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.options import DEBUG, ON_PAPER, PRODUCT, Workers, add
from multimm.cli.terminal import say
from multimm.errors import FileFormatError, OptionError

if TYPE_CHECKING:
    from multimm.planning.hardware import ClusterSpec
    from multimm.planning.matrix import MatrixSpec

#: Chunks along a side of an operand on paper: arbitrary. More take seconds to write down.
MOST_BLOCKS = 10**6


@click.command(short_help="Say how long a product takes, and how much memory.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B", required=False)
@click.argument("more", metavar="[C ...]", nargs=-1)
@add(*PRODUCT, *ON_PAPER)
@click.option("--chunks", type=int, metavar="N", help="Blocks that the operands come in, N x N.")
@click.option("--host", is_flag=True, help="Operands lie in host memory, and C is to go there.")
@click.option(
    "--symmetric", "--gram", is_flag=True, help="A A^T, or with --trans-a A^T A: leave B out."
)
@click.option("--einsum", metavar="SUBSCRIPTS", help='Sums over any axes, such as "txy,tuv->xyuv".')
@click.option("--per-node", type=int, metavar="N", help="Workers of one node. Default: all.")
@click.option("--node-link", type=float, metavar="GB/S", help="Rate of a worker to other nodes.")
@click.option(
    "--elements", metavar="NAME", help="Dtype of MxK and KxN. Default: --dtype, or float32."
)
@DEBUG
def plan(
    a: str,
    b: str | None,
    more: tuple[str, ...],
    chunks: int | None,
    einsum: str | None,
    elements: str | None,
    host: bool,
    symmetric: bool,
    per_node: int | None,
    node_link: float | None,
    **options: Any,
) -> None:
    """Print how A times B would be computed; A and B are shapes such as 65536x65536, or files.

    With --einsum these may have any number of axes, and C and others may follow.

    Plans for H200 GPUs (--gpus) or for CPU workers of this machine (--workers); none are started.
    Rates are as shipped, unless `multimm tune` measured them here. Exit code 2 if the
    product does not fit in the workers' memory.
    """
    import multimm
    from multimm.cluster.calibration import store

    if symmetric if einsum is not None else more or symmetric == (b is not None):
        raise OptionError(
            "give A and B, or A and --symmetric for A times its own transpose, or any with --einsum"
        )
    names = ("gpus", "workers", "memory_limit", "threads")
    workers = Workers(**{name: options.pop(name) for name in names})
    held = elements or options["dtype"] or "float32"
    texts = [a, *([] if b is None else [b]), *more]
    given: list[Any] = [operand(x, chunks, held, host, matrix=einsum is None) for x in texts]
    if einsum is not None:
        given = [einsum, *given]
    if symmetric:
        given *= 2
        options["trans_b"] = not options["trans_a"]
    paper = store.applied(workers.on_paper(), store.stored())
    cluster = with_nodes(paper, per_node, node_link)
    made = multimm.plan(*given, **options, cluster=cluster)
    say(f"{made}\n\n{machine(workers)}")
    made.check()


def machine(workers: Workers) -> str:
    """For what is planned, and how to plan for something else."""
    if workers.workers is not None or workers.gpus == 0:
        return "Planned for CPU workers of this machine; none are started."
    count = 1 if workers.gpus is None else workers.gpus
    other = "" if workers.gpus is not None else " (--gpus N: more; --workers N: CPU workers here)"
    return f"Planned for {count} NVIDIA H200, which need not be here{other}."


def with_nodes(cluster: ClusterSpec, per_node: int | None, gbps: float | None) -> ClusterSpec:
    """The same workers spread over nodes with slower links between them."""
    if per_node is None:
        if gbps is not None:
            raise OptionError("--node-link is the rate between nodes: give --per-node as well")
        return cluster
    if per_node < 1 or (gbps is not None and gbps <= 0):
        raise OptionError(f"--per-node {per_node}, --node-link {gbps}: both must be positive")
    between = cluster.between
    if gbps is not None:
        between = replace(between, gbps=gbps, measured="")
    return replace(cluster, per_node=per_node, between=between)


def operand(
    text: str, chunks: int | None, dtype: str, hosted: bool, *, matrix: bool = True
) -> MatrixSpec | Any:
    """A matrix on paper, or the one in a file; or, if not `matrix`, an array of any shape."""
    from multimm.files import locate
    from multimm.gpu.dtypes import named
    from multimm.io import open_array
    from multimm.planning.matrix import MatrixSpec
    from multimm.planning.tiling.grid import regular

    itemsize = named(dtype).itemsize
    if chunks is not None and chunks < 1:
        raise OptionError(f"--chunks {chunks}: at least 1 is needed")
    match = re.fullmatch(r"\d+[xX]\d+" if matrix else r"\d+([xX]\d+)+", text)
    if match is None:
        try:
            locate(text)
        except FileFormatError as error:
            raise FileFormatError(f"{error}; a shape is 65536x65536, two integers") from None
        return open_array(text, chunks=chunks)
    shape = tuple(map(int, re.split("[xX]", text)))
    if chunks is not None and max(shape) > MOST_BLOCKS * chunks:
        raise OptionError(
            f"--chunks {chunks}: {text} has more than {MOST_BLOCKS} of them along a side; give "
            "larger ones"
        )
    blocks = tuple(regular(size, chunks or max(size, 1)) for size in shape)
    return MatrixSpec(shape, dtype, itemsize, blocks, hosted=hosted)
