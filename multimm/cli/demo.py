"""``multimm demo``: real data through files, then a large product, both checked."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multimm.cli.matmul import InputFiles, described, multiply
from multimm.cli.options import DEBUG, KIND, Workers, add
from multimm.cli.run import RunError, compute, failed_run
from multimm.cli.terminal import say
from multimm.errors import OptionError, how_to_install, printable

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

#: Leave-one-out accuracy of the nearest neighbour by cosine; computed with NumPy: 0.988.
LEAST_ACCURACY = 0.95
#: Edges of the random product: seconds of work on two CPU cores, and on one H200.
EDGE = {"cpu": 4096, "gpu": 32768}
#: Share of all workers' memory that A, B and C of the random product may take: arbitrary.
MEMORY_SHARE = 0.25


@click.command(short_help="Plan, compute and check two products here.")
@click.option("--size", type=int, metavar="N", help="Edge of the random product.")
@click.option("--keep", metavar="DIR", help="Keep the files here. Default: a temporary folder.")
@add(*KIND)
@DEBUG
def demo(size: int | None, keep: str | None, gpus: int | None, workers: int | None) -> None:
    """Find each handwritten digit's nearest neighbour, then multiply large random matrices.

    Starts workers on this host: its GPUs, or CPU processes where there is none.
    """
    if size is not None and size < 1:
        raise OptionError(f"--size {size}: at least 1 is needed")
    images, labels = load_digits()
    with ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="multimm-")))
        client = stack.enter_context(Workers(gpus=gpus, workers=workers).open())
        heading(
            f"Digits: {len(images)} handwritten images, compared all with all through Zarr files"
        )
        accuracy = similarity(client, images, labels, folder)
        say(f"nearest   {accuracy:.1%} of the images show the same digit as their neighbour\n")
        heading("A larger product of random matrices, made and kept on the workers")
        random_product(client, size or edge_that_fits(client))
    if accuracy <= LEAST_ACCURACY:
        raise RunError(f"accuracy {accuracy:.3f}: above {LEAST_ACCURACY} is expected")
    say("\nAll results are right.", bold=True, fg="green")
    if keep:
        say(f"The matrices are in {printable(folder)}: digits.zarr and similarity.zarr.")


def heading(text: str) -> None:
    """A line that stands out on a terminal."""
    say(text, bold=True)


def load_digits() -> tuple[Any, Any]:
    """Images as unit rows of float32, shape (1797, 64), and the digits that they show."""
    import numpy as np

    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise OptionError(
            f"the demo needs scikit-learn, zarr and h5py: {how_to_install('demo')}"
        ) from None
    images, labels = load(return_X_y=True)
    unit = images / np.linalg.norm(images, axis=1, keepdims=True)
    return unit.astype(np.float32), labels


def similarity(client: Client, images: Any, labels: Any, folder: Path) -> float:
    """S = X X^T from file to file; the share of rows whose best other column has their label."""
    import dask.array as da
    import numpy as np

    from multimm.io import Output, open_array, save_array

    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "digits.zarr", folder / "similarity.zarr"
    save_array(da.from_array(images, chunks=(600, -1)), paths[0], overwrite=True)
    files = InputFiles(str(paths[0]), str(paths[0]), None, None)
    product = {"alpha": 1, "trans_b": True, "trans_a": False, "precision": "float32"}
    with Output(paths[1], overwrite=True) as target:
        multiply(client, files, target, product, verify=True)
        target.commit()
    with failed_run(client):
        scores = open_array(paths[1]).compute()
    np.fill_diagonal(scores, -np.inf)  # an image is not its own neighbour
    return float(np.mean(labels[scores.argmax(axis=1)] == labels))


def edge_that_fits(client: Client) -> int:
    """The device's usual edge, halved until three matrices take a fair share of the memory."""
    spec = described(client)
    edge = EDGE[spec.slowest.kind]
    while edge > 256 and 3 * 4 * edge**2 > MEMORY_SHARE * spec.workers * spec.budget_bytes:
        edge //= 2
    return edge


def random_product(client: Client, size: int) -> None:
    """C = A B of normal random blocks: planned, timed, checked."""
    import multimm

    gpu = described(client).on_gpus
    a, b = (random_matrix(size, seed, gpu=gpu) for seed in (1, 2))
    a, _ = compute(client, a, "making A")
    b, _ = compute(client, b, "making B")
    plan = multimm.plan(a, b)
    say(f"{plan}\n")
    plan.check()
    c, seconds = compute(client, multimm.matmul(a, b), "multiplying", plan)
    say(f"{plan.compare(seconds)}\n")
    with failed_run(client):
        result = multimm.verify(a, b, c)
    if not result:
        raise RunError(str(result))
    say(f"checked   {result}")


def random_matrix(size: int, seed: int, *, gpu: bool) -> da.Array:
    """A lazy square matrix of normal float32 numbers, in up to 4 x 4 blocks."""
    import dask.array as da

    from multimm.planning.tiling.grid import regular

    start: Any = seed
    if gpu:
        import cupy

        start = cupy.random.default_rng(seed)
    blocks = regular(size, -(-size // 4))
    numbers: da.Array = da.random.default_rng(start).standard_normal(
        (size, size), chunks=(blocks, blocks), dtype="float32"
    )
    return numbers
