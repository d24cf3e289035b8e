"""What type checkers know of multimm: kinds of results, and options that do not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from commands import python

import multimm
from multimm.gpu.kernel_selection import PRECISIONS

ROOT = Path(__file__).parent.parent
#: Each line ends with what it is to be: a type, or "refused".
CALLS = '''
from decimal import Decimal
from fractions import Fraction

import dask.array as da
import numpy as np
import xarray as xr
from distributed import Client
from numpy.typing import NDArray

import multimm


class OnGpu:  # as a checker sees cupy.ndarray
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {}


@multimm.accelerate()
def halved(count: int) -> str:
    return str(count / 2)


class Halves:
    @multimm.accelerate()
    @staticmethod
    def of(count: int) -> str:
        return str(count / 2)


def check(
    x: da.Array,
    n: NDArray[np.float32],
    g: OnGpu,
    packed: multimm.gpu.PackedBlock,
    d: xr.DataArray,
    p: multimm.Precision,
) -> None:
    reveal_type(multimm.matmul(x, x, precision=p))  # Array
    reveal_type(multimm.matmul(x, n, chunks="operands"))  # Array
    reveal_type(multimm.matmul(n, x, dtype="int32"))  # Array
    reveal_type(multimm.matmul([x, x], n))  # Array
    reveal_type(multimm.matmul(n, n, blocks=(8, 8)))  # ndarray
    reveal_type(multimm.matmul([[1, 2]], n))  # ndarray
    reveal_type(multimm.matmul(g, g))  # OnGpu
    reveal_type(multimm.matmul(packed, g))  # OnGpu
    reveal_type(multimm.matmul(packed, packed))  # Any
    reveal_type(multimm.matmul(d, d))  # DataArray
    reveal_type(multimm.gemm(2, x, n))  # Array
    reveal_type(multimm.gemm(2, n, x, trans_a=True))  # Array
    reveal_type(multimm.gemm(2, n, n, 1, x))  # Array
    reveal_type(multimm.gemm(2, n, n, beta=1, c=n))  # ndarray
    reveal_type(multimm.gemm(np.float32(2), n, n, np.int64(1), n))  # ndarray
    reveal_type(multimm.gemm(n.max(), x, n, np.array(2.0), x))  # Array
    reveal_type(multimm.gemm(Fraction(1, 3), n, n, Decimal("0.5"), n))  # ndarray
    reveal_type(multimm.gemm(2, g, g))  # OnGpu
    reveal_type(multimm.gemm(2, g, packed, 1, g))  # OnGpu
    reveal_type(multimm.transpose(x))  # Array
    reveal_type(multimm.transpose(n))  # ndarray
    reveal_type(multimm.transpose(g))  # OnGpu
    reveal_type(multimm.einsum("ij,jk", x, n))  # Array
    reveal_type(multimm.einsum("ij,jk", n, x, precision="tf32"))  # Array
    reveal_type(multimm.einsum("ij,jk,kl", n, n, x))  # Array
    reveal_type(multimm.einsum("ij,jk", n, n, optimize="greedy"))  # ndarray
    reveal_type(multimm.einsum("ij,jk", g, g))  # OnGpu
    reveal_type(multimm.tensordot(x, n, axes=1))  # Array
    reveal_type(multimm.tensordot(n, n))  # ndarray
    reveal_type(multimm.vecdot(n, x, axis=0))  # Array
    reveal_type(multimm.vecdot(g, g))  # OnGpu
    reveal_type(multimm.inner(x, x))  # Array
    reveal_type(multimm.inner(n, n))  # ndarray
    reveal_type(multimm.outer(x, n))  # Array
    reveal_type(multimm.outer(n, n))  # ndarray
    reveal_type(multimm.plan(x, n, alpha=np.complex64(2), c=n))  # MatmulPlan
    reveal_type(multimm.plan("ij,jk", x, n))  # ContractionPlan
    reveal_type(multimm.verify(x, x, x))  # Verification
    reveal_type(halved(3))  # str
    reveal_type(Halves().of(3))  # str
    reveal_type(multimm.cluster.start())  # Client
    reveal_type(multimm.cluster.connect(Client()))  # Client
    multimm.matmul(x, x, precision="fp64")  # refused
    multimm.gemm(1, n, n, precision="fp64")  # refused
    multimm.einsum("ij,jk", x, x, precision="fp64")  # refused
    multimm.tensordot(n, n, precision="fp64")  # refused
    multimm.inner(n, n, precision="fp64")  # refused
    multimm.vecdot(n, n, precision="fp64")  # refused
    multimm.plan(x, x, precision="fp64")  # refused
    multimm.plan("ij,jk", x, x, precision="fp64")  # refused
    multimm.verify(x, x, x, precision="fp64")  # refused
    multimm.matmul(x, x, blocks="large")  # refused
    multimm.gemm("2", x, x)  # refused
    halved("3")  # refused
    multimm.cluster.start(protocol="mpi")  # refused
'''  # fmt: skip


def found(said: str) -> dict[int, set[str]]:
    """By line: the types that a checker reveals, without their modules, and what it refuses."""
    lines: dict[int, set[str]] = {}
    for at, rest in re.findall(r"calls\.py:(\d+)(?::\d+)?\s*[:-] (.*)", said):
        revealed = re.search(r"(?:Revealed type|Type of .*) is \"(?:[a-z_]+\.)*(\w+)", rest)
        if revealed or rest.startswith("error"):
            lines.setdefault(int(at), set()).add(revealed[1] if revealed else "refused")
    return lines


def wanted() -> dict[int, set[str]]:
    lines = enumerate(CALLS.splitlines(), 1)
    return {at: {line.split("# ")[1]} for at, line in lines if ")  # " in line}


def checked(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "calls.py").write_text(CALLS)
    return python("-m", *command, folder / "calls.py", cwd=ROOT, env={"MYPYPATH": str(ROOT)})


def test_mypy_knows_the_kind_of_a_result_and_refuses_options_that_do_not_exist(tmp_path):
    """Strictly, as pyproject.toml says; so are the examples, by `make lint`."""
    done = checked(tmp_path, "mypy", "--hide-error-context")
    assert found(done.stdout) == wanted(), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_knows_it_too_and_passes_the_examples(tmp_path):
    done = checked(tmp_path, "pyright", "--pythonpath", sys.executable, "examples")
    assert found(done.stdout) == wanted(), done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if " - error" in line]
    assert all("calls.py:" in line for line in errors), done.stdout


def test_there_is_one_list_of_precisions():
    assert get_args(multimm.Precision) == PRECISIONS
