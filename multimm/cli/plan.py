"""``multimm plan A B``: the dry run, for shapes or files, without any worker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.options import DEBUG, PRODUCT, WORKERS, Workers, add

if TYPE_CHECKING:
    from multimm.planning.spec import MatrixSpec


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@add(*PRODUCT, *WORKERS)
@click.option("--chunks", type=int, metavar="N", help="Blocks that the operands come in, N x N.")
@click.option("--dtype", default="float32", show_default=True, help="Elements of MxK and KxN.")
@DEBUG
def plan(a: str, b: str, chunks: int | None, dtype: str, **options: Any) -> None:
    """Print how A times B would be computed; A and B are shapes such as 65536x65536, or files.

    Plans for H200 GPUs (--gpus, default 1) or for CPU workers of this machine (--workers);
    none are started. Exit code 2 if the product does not fit in the workers' memory.
    """
    import multimm

    names = ("gpus", "workers", "memory_limit", "threads")
    workers = Workers(**{name: options.pop(name) for name in names})
    operands = [operand(text, chunks, dtype) for text in (a, b)]
    made = multimm.plan(*operands, **options, cluster=workers.on_paper())
    click.echo(str(made))
    made.check()


def operand(text: str, chunks: int | None, dtype: str) -> MatrixSpec | Any:
    """A matrix on paper, or the one in a file."""
    import numpy as np

    from multimm.errors import DTypeError, OptionError
    from multimm.io import open_array
    from multimm.planning.grid import regular
    from multimm.planning.spec import MatrixSpec

    if chunks is not None and chunks < 1:
        raise OptionError(f"--chunks {chunks}: at least 1 is needed")
    match = re.fullmatch(r"(\d+)[xX](\d+)", text)
    if match is None:
        return open_array(text, chunks=chunks)
    try:
        itemsize = np.dtype(dtype).itemsize
    except TypeError:
        raise DTypeError(f"--dtype {dtype}: use NumPy's names, such as float32") from None
    shape = int(match[1]), int(match[2])
    blocks = tuple(regular(size, chunks or max(size, 1)) for size in shape)
    return MatrixSpec(shape, dtype, itemsize, blocks)
