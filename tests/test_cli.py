"""The command line, from files to files, and mistakes that users make with it."""

from __future__ import annotations

import itertools
import time
from importlib import import_module

import click
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from clusters import forked, in_threads
from commands import python
from distributed.core import Status
from foreign_files import get, names, put
from repeated import others_slow
from small import integers

import multimm
from multimm import io
from multimm.cli import Commands, main
from multimm.cli import run as cli_run
from multimm.errors import KernelError, MultimmError

FORMATS = ["npy", "zarr", "h5"]


@pytest.fixture(scope="module")
def address():
    """A running cluster of two worker processes."""
    with forked(), multimm.cluster.start(workers=2, memory_limit="1GB") as client:
        yield client.scheduler.address


@pytest.fixture
def cli():
    def run(*args):
        return CliRunner().invoke(main, [str(arg) for arg in args])

    return run


@pytest.fixture
def operands(tmp_path):
    """A and B as .npy files, and the folder is otherwise empty."""
    return put(tmp_path / "a.npy", integers((40, 30))), put(tmp_path / "b.npy", integers((30, 50)))


def assert_one_line(result, code, *texts):
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("multimm: error: ")
    for text in texts:
        assert text in lines[0]


# Products -------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_a_product_beside_its_factors(tmp_path, cli, address, suffix):
    a, b = integers((40, 30)), integers((30, 50), 1)
    path = tmp_path / f"m.{suffix}"
    io.save_array(a, path, dataset="a")
    io.save_array(b, path, dataset="b")
    args = ("matmul", f"{path}:a", f"{path}:b", "-o", f"{path}:/c", "--scheduler", address)
    for flags in ((), ("--overwrite", "--alpha", -1)):
        result = cli(*args, *flags)
        assert result.exit_code == 0, result.output
        expected = -(a @ b) if flags else a @ b
        for name, matrix in (("a", a), ("b", b), ("c", expected)):
            np.testing.assert_array_equal(io.open_array(path, dataset=name).compute(), matrix)
        assert names(tmp_path) == [path.name]
    assert_one_line(cli(*args), 2, "exists already")


@pytest.mark.parametrize(
    ("form_a", "form_b", "form_c"),
    [("npy", "npy", "npy"), ("npy", "zarr", "h5"), ("zarr", "h5", "npy"), ("h5", "npy", "zarr")],
)
def test_a_product_from_files_to_a_file(tmp_path, cli, address, form_a, form_b, form_c):
    a, b = integers((40, 30)), integers((30, 50), 1)
    path_a, path_b = put(tmp_path / f"a.{form_a}", a), put(tmp_path / f"b.{form_b}", b)
    path_c = tmp_path / f"c.{form_c}"
    result = cli("matmul", path_a, path_b, "-o", path_c, "--scheduler", address)
    assert result.exit_code == 0, result.output
    for text in ("40 x 30 @ 30 x 50", "FLOP/s", "verified", str(path_c)):
        assert text in result.stdout
    assert "\x1b" not in result.output  # no progress bar where stdout is no terminal
    np.testing.assert_array_equal(get(path_c), a @ b)
    assert names(tmp_path) == sorted({path_a.name, path_b.name, path_c.name})


@pytest.mark.parametrize(
    ("order", "trans_b", "trans_a"),
    others_slow(
        itertools.product(["C", "F"], [False, True], [False, True]),
        *(("C", True, False), ("F", False, True), ("F", True, True)),
    ),
)
def test_transposes_alpha_and_blocks(tmp_path, cli, address, trans_a, trans_b, order):
    a, b = integers((40, 30)), integers((30, 50), 1)
    files = [
        put(tmp_path / "a.npy", np.asarray(a.T if trans_a else a, order=order)),
        put(tmp_path / "b.npy", np.asarray(b.T if trans_b else b, order=order)),
    ]
    flags = ["--trans-a"] * trans_a + ["--trans-b"] * trans_b
    blocks = ["--blocks", 16, "--slabs", 7, "--alpha", -0.5]
    output = tmp_path / "c.zarr"
    result = cli("matmul", *files, "-o", output, "--scheduler", address, *flags, *blocks)
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(get(output), -0.5 * (a @ b))
    assert zarr.open_array(output, mode="r").chunks == (16, 16)


def test_the_dtype_of_the_result(tmp_path, cli, address):
    a, b = (np.full((9, 9), 100, np.int8) for _ in "ab")
    files = put(tmp_path / "a.npy", a), put(tmp_path / "b.npy", b)
    output = tmp_path / "c.npy"
    result = cli("matmul", *files, "-o", output, "--scheduler", address, "--dtype", "int32")
    assert result.exit_code == 0, result.output
    assert "exact modulo 2^32, on NumPy" in result.stdout
    assert "all integers agree" in result.stdout
    np.testing.assert_array_equal(get(output), np.full((9, 9), 90_000, np.int32), strict=True)


def test_float64_by_name(operands, tmp_path, cli, address):
    output = tmp_path / "c.npy"
    asked = ("--precision", "float64", "--dtype", "float64", "--scheduler", address)
    result = cli("matmul", *operands, "-o", output, *asked)
    assert result.exit_code == 0, result.output
    a, b = (np.load(x).astype("float64") for x in operands)
    np.testing.assert_array_equal(get(output), a @ b, strict=True)
    planned = cli("plan", "9000x9000", "9000x9000", "--elements", "float64", *asked[:2])
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize(
    ("dtype", "option", "said"),
    [
        ("int8", ("--alpha", 300), "300 does not fit int8"),
        ("float64", ("--dtype", "int32"), "a has dtype float64, whose fractions would be lost"),
    ],
)
def test_what_the_result_cannot_hold_starts_no_workers(
    tmp_path, cli, monkeypatch, dtype, option, said
):
    monkeypatch.setattr(multimm.cluster, "start", None)
    path = put(tmp_path / "a.npy", np.ones((4, 4), dtype))
    assert_one_line(cli("matmul", path, path, "-o", tmp_path / "c.npy", *option), 2, said)


def test_plan_of_narrow_elements(cli):
    result = cli("plan", "30x40", "30x50", "--trans-a", "--dtype", "int16")
    assert "40 x 30 @ 30 x 50 -> int16" in result.stdout
    result = cli("plan", "4000x3000", "3000x5000", "--elements", "int8", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "4000 x 3000 @ 3000 x 5000 -> float32 of int8" in result.stdout
    assert "exact, rounded once to float32, on INT8 tensor cores" in result.stdout


def test_a_plan_of_bfloat16_needs_no_import():
    result = python("-m", "multimm", "plan", "64x64", "64x64", "--dtype", "bfloat16")
    assert "64 x 64 @ 64 x 64 -> bfloat16" in result.stdout, result.stderr


def test_plan_of_sums_over_any_axes(cli):
    shapes = "4000x160x320", "4000x160x320"
    result = cli("plan", "--einsum", "txy,tuv->xyuv", *shapes, "--chunks", 500, "--gpus", 4)
    assert result.exit_code == 0, result.output
    assert "step 1 of 1: txy,tuv->xyuv\n" in result.stdout
    assert "51200 x 4000 @ 4000 x 51200 -> float32" in result.stdout
    result = cli("plan", "--einsum", "pqrs,pi,qj->ijrs", "40x40x40x40", "40x20", "40x20")
    assert "step 2 of 2: " in result.stdout
    result = cli("plan", "--einsum", "ij->ji", "40x30")
    assert "by Dask: not predicted" in result.stdout


# Bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "output", "options", "texts"),
    [
        ("a.npy", "a.npy", "c.npy", [], ["30 columns", "40 rows"]),
        ("a.npy", "b.npy", "c.npy", ["--trans-b"], ["30 columns", "50 rows"]),
        ("no.npy", "b.npy", "c.npy", [], ["no.npy: no such file"]),
        ("vector.npy", "b.npy", "c.npy", [], ["(30,)", "2 dimensions"]),
        ("m.h5", "b.npy", "c.npy", ["--dataset-a", "X"], ["no dataset 'X'", "M (40, 30)"]),
        ("a.npy", "b.npy", "c.nc", [], ["c.nc: .nc is read and not written"]),
        ("a.npy", "b.npy", "c.npy", ["--dataset-c", "X"], ["leave out the dataset"]),
        ("a.npy", "b.npy", "c.npy", ["--precision", "float64"], ["float32", "dtype='float64'"]),
        ("a.npy", "b.npy", "c.npy", ["--blocks", "x"], ["'x' is not a valid integer", "--help"]),
        ("a.npy", "b.npy", "c.npy", ["--gpus", "0", "--memory-limit", "lots"], ["'lots'"]),
        ("a.npy", "b.npy", "c.npy", ["--gpus", "0", "--protocol", "smoke"], ["'smoke'"]),
        ("a.npy", "b.npy", "c.npy", ["--scheduler", "nowhere"], ["nowhere", "tcp://host:8786"]),
        (
            *("a.npy", "b.npy", "c.npy"),
            ["--scheduler", "tcp://127.0.0.1:9", "--workers", "2"],
            ["--scheduler", "--workers"],
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, operands, cli, a, b, output, options, texts):
    put(tmp_path / "vector.npy", integers(30))
    put(tmp_path / "m.h5", integers((40, 30)))
    before = names(tmp_path)
    result = cli("matmul", tmp_path / a, tmp_path / b, "-o", tmp_path / output, *options)
    assert_one_line(result, 2, *texts)
    assert names(tmp_path) == before


#: Of clusters of threads that are reached through TCP.
OVER_TCP = {"protocol": "tcp", "host": "127.0.0.1"}


def test_too_little_memory_is_said_before_anything_runs(tmp_path, cli):
    big = put(tmp_path / "big.npy", np.zeros((2000, 2000), "float32"))
    with in_threads(1, memory_limit=10**6, **OVER_TCP) as cluster:
        result = cli(
            *("matmul", big, big, "-o", tmp_path / "c.npy", "--blocks", 2000),
            *("--scheduler", cluster.scheduler_address),
        )
    assert_one_line(result, 2, "may use 600 kB of its 1 MB")
    assert names(tmp_path) == ["big.npy"]


def test_a_cluster_without_workers_is_refused(operands, cli, tmp_path):
    with in_threads(0, **OVER_TCP) as cluster:
        address = cluster.scheduler_address
        result = cli("matmul", *operands, "-o", tmp_path / "c.npy", "--scheduler", address)
    assert_one_line(result, 2, "no workers")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["matmul"], "Missing argument 'A'"),
        (["matmul", "a.npy", "b.npy", "--nope"], "No such option"),
        (["nope"], "No such command"),
        (["--nope"], "No such option"),
    ],
)
def test_a_wrong_command_line_points_to_help(cli, args, text):
    assert_one_line(cli(*args), 2, text, "--help")


def test_debug_may_stand_before_the_command(cli):
    assert "Traceback" in cli("--debug", "plan", "no.npy", "3x3").stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MultimmError("wrong\n  input"), 2, "error: wrong input\n"),
        (KernelError("no image"), 1, "error: no image\n"),
        (ZeroDivisionError("oops"), 1, "error: ZeroDivisionError: oops (--debug shows more)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(error, code, text):
    def fail():
        raise error

    group = Commands("multimm")
    group.get_command = lambda ctx, name: click.Command(name, callback=fail)
    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == code
    assert result.stderr.endswith(f"multimm: {text}")


# Runs that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_failing_task_leaves_nothing(tmp_path, cli, address, form):
    a = put(tmp_path / "a.zarr", integers((40, 30)))
    b = put(tmp_path / "b.npy", integers((30, 50)))
    chunk = a / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:5])
    output = tmp_path / f"c.{form}"
    result = cli("matmul", a, b, "-o", output, "--scheduler", address)
    assert_one_line(result, 1, "the run failed: block (0, 0) of A failed on tcp://127.0.0.1:")
    assert names(tmp_path) == ["a.zarr", "b.npy"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_wrong_product_never_gets_its_name(operands, tmp_path, cli, address, form, monkeypatch):
    truth = multimm.verify

    def verify(a, b, c, **options):
        return truth(a, b, c + 1, **options)

    monkeypatch.setattr(multimm, "verify", verify)
    output = tmp_path / f"c.{form}"
    result = cli("matmul", *operands, "-o", output, "--scheduler", address)
    assert_one_line(result, 1, "WRONG")
    assert names(tmp_path) == ["a.npy", "b.npy"]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_product_is_held_to_the_precision_that_was_asked_for(
    operands, tmp_path, cli, address, precision, monkeypatch
):
    truth = multimm.verify
    monkeypatch.setattr(
        multimm, "verify", lambda a, b, c, **options: truth(a, b, c * (1 + 2**-10), **options)
    )
    output = tmp_path / "c.npy"
    asked = ("-o", output, "--precision", precision, "--scheduler", address)
    result = cli("matmul", *operands, *asked)
    if precision == "tf32":
        assert result.exit_code == 0, result.output
        assert "verified" in result.stdout
    else:
        assert_one_line(result, 1, "WRONG")


@pytest.mark.parametrize(
    ("how", "during"),
    others_slow(
        itertools.product(["gone", "paused"], ["compute", "verify"]),
        *(("gone", "verify"), ("paused", "compute")),
    ),
)
def test_a_run_whose_workers_take_no_tasks_is_given_up(
    operands, tmp_path, cli, monkeypatch, during, how
):
    monkeypatch.setattr(cli_run, "NO_WORKERS_SECONDS", 0.5)
    monkeypatch.setattr(cli_run, "PAUSED_SECONDS", 0.5)
    of = import_module("multimm.cli.matmul") if during == "compute" else multimm
    go_on = getattr(of, during)
    with in_threads(1, memory_limit=0, **OVER_TCP) as cluster:

        def lose(*args, **options):
            if how == "gone":
                cluster.scale(0)
            else:
                cluster.workers[0].status = Status.paused
            while cluster.scheduler.running:
                time.sleep(0.05)
            return go_on(*args, **options)

        monkeypatch.setattr(of, during, lose)
        address = cluster.scheduler_address
        result = cli("matmul", *operands, "-o", tmp_path / "c.npy", "--scheduler", address)
    text = "no worker left" if how == "gone" else "no worker has taken a task for"
    assert_one_line(result, 1, text)
    assert names(tmp_path) == ["a.npy", "b.npy"]


def test_a_terminal_shows_a_progress_bar(operands, tmp_path, address):
    args = ["matmul", *map(str, operands), "-o", str(tmp_path / "c.npy"), "--scheduler", address]
    result = CliRunner().invoke(main, args, env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert result.exit_code == 0, result.output
    assert "multiplying" in result.stdout
    assert "100%" in result.stdout


# The other commands ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["3x4", "5x6"], ["the 4 columns of a must equal the 5 rows of b"]),
        (["3x4", "no.npy"], ["no.npy: no such file"]),
        (["3x4", "4x5x6"], ["4x5x6: ", "supported are", "a shape is 65536x65536"]),
        (["1e6x10", "10x3"], ["1e6x10: ", "a shape is 65536x65536"]),
        (["3.5x4", "4x3"], ["3.5x4: ", "a shape is 65536x65536"]),
        (["abc", "--symmetric"], ["abc: ", "a shape is 65536x65536"]),
        (["3x4", "4x5", "--gpus", "-1"], ["--gpus -1: at least 0"]),
        (["3x4", "4x5", "--dtype", "cat"], ["there is no dtype 'cat'"]),
        (["3x4", "4x5", "--dtype", "object"], ["object"]),
        (["3x4", "4x5", "--elements", "cat"], ["there is no dtype 'cat'"]),
        (["3x4", "4x5", "--elements", "complex64", "--dtype", "int8"], ["imaginary parts"]),
        (["3x4", "4x5", "--chunks", "0"], ["--chunks 0"]),
        (["3x4", "4x5", "--memory-limit", "2GB"], ["--workers"]),
        (["3x4", "4x5", "--precision", "half"], ["'half'"]),
        (["3x4", "4x5", "5x6"], ["--einsum"]),
        (["3x4", "--symmetric", "--einsum", "ij,ik"], ["--symmetric"]),
        (["3x4", "4x5", "--einsum", "ij,kj"], ["'j' has sizes 4 and 5"]),
        (["3x4", "4x5", "--einsum", "ij,jk", "--trans-a"], ["with trans_a"]),
    ],
)
def test_plan_refuses_in_one_line(cli, args, texts):
    assert_one_line(cli("plan", *args), 2, *texts)


def test_plan_of_files_refuses_elements_that_do_not_exist(cli, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((3, 3)))
    both = (tmp_path / "a.npy",) * 2
    assert_one_line(cli("plan", *both, "--elements", "cat"), 2, "there is no dtype 'cat'")


def test_plan_that_does_not_fit_is_shown_and_refused(cli):
    few = "--workers", 2, "--memory-limit", "1GB", "--blocks", 16384
    result = cli("plan", "65536x65536", "65536x65536", *few)
    assert "memory " in result.stdout
    assert_one_line(result, 2, "may use 534 MB", "leave out blocks=")


def test_help_and_version(cli):
    assert "matmul" in cli("--help").output
    assert "..." not in cli("--help").output.partition("Commands:")[2]  # each line is whole
    assert cli("--version").output == f"multimm, version {multimm.__version__}\n"
    for name in ("matmul", "plan", "demo", "doctor", "tune", "report"):
        result = cli(name, "--help")
        assert result.exit_code == 0
        assert result.stdout.startswith(f"Usage: main {name}")
    bare = cli()
    assert bare.exit_code == 2
    assert "Commands:" in bare.stderr
