"""What users read of a plan: a summary, then a line for each figure, in units and known words."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import golden_plans
import numpy as np
import pytest

import multimm
from multimm.planning.choice import plan_matmul
from multimm.planning.explain.arithmetic import arithmetic
from multimm.planning.explain.picture import matrices
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec

GPUS = ClusterSpec.homogeneous(H200, 2)
CPUS = ClusterSpec.homogeneous(DeviceSpec("cpu", "cpu", 2 * 10**9, 50.0, 20.0), 4, LOCAL_TCP)


def plan_of(size, cluster, **options):
    side = MatrixSpec((size, size))
    return plan_matmul(Problem(side, side), cluster, options=Options(**options))


def assert_readable(plan):
    text = repr(plan)
    assert text == str(plan)
    assert len(text) <= 2500
    assert max(map(len, text.splitlines())) <= 100
    assert text.isprintable() or set(text) - {"\n"} == {x for x in text if x.isprintable()}
    assert not re.search(r"\d\.\d+e[+-]?\d", text)  # no number needs a second look
    assert not re.search(r"\b(gram|chain|slab|portion|stretch|k-tile)", text, re.I)


class Tags(HTMLParser):
    """Checks that each tag is closed in its turn; counts them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], Counter(), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] += 1
        assert not {name for name, _ in attrs if name.startswith("on") or name in ("src", "href")}
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def assert_page(made):
    """Self-contained, of bounded size, no script, nothing that only suits a light page."""
    page = Tags(made._repr_html_())
    assert not page.seen["script"] + page.seen["img"] + page.seen["link"]
    assert len(made._repr_html_()) < 60_000
    assert not re.search("background:(#|white)|[^-]color:(#|black)", made._repr_html_())
    return page


@pytest.mark.parametrize("workers", [1, 3, 1024, 4096])
def test_no_number_of_workers_makes_it_long(workers):
    """Workers of all kinds, with names that are no shorter than drivers may give them."""
    few = (replace(H200, name=f"GPU {i} " + "x" * 200, memory_bytes=10**11 + i) for i in range(9))
    devices = tuple(few) * (workers // 9 + 1)
    cluster = ClusterSpec(devices[:workers], per_node=min(workers, 8))
    side = MatrixSpec((100_003, 100_003), "float16")
    plan = multimm.plan(side, side, c=side, beta=1, cluster=cluster)
    assert_readable(plan)
    assert_page(plan)
    assert len(repr(cluster)) < 500
    assert_page(cluster)


def test_all_kinds_of_plans_are_readable(tmp_path):
    """Every tenth of the golden problems: files, stacks, operands in place, host memory."""
    seen = set()
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        for problem, known in golden_plans.read()[::10]:
            if known.get("refused"):
                continue
            plan = golden_plans.plan_of(problem, Path(folder))
            assert_readable(plan)
            assert assert_page(plan).seen["path"] >= 3
            seen |= {line.split()[0] for line in str(plan).splitlines() if line[:1].strip()}
    assert {"operands", "chunks", "host", "links"} < seen


@pytest.mark.parametrize(
    ("dtype", "asked", "cpu", "gpu"),
    [
        (
            "float32",
            {},
            "float32, by NumPy's BLAS",
            "three FP16 products; as accurate as a float32",
        ),
        ("float32", {"precision": "tf32"}, "float32, by NumPy's BLAS", "rounded to 11 bits"),
        ("float32", {"precision": "ieee"}, "float32, by NumPy's BLAS", "FP32 multiply-adds"),
        ("float16", {}, "float32, by NumPy's BLAS, rounded to float16", "holds the operands"),
        ("float64", {}, "float64, by NumPy's BLAS", "float64, on INT8 tensor cores, by residues"),
        ("float64", {"precision": "float64"}, "float64, by NumPy's BLAS", "by residues"),
        ("float64", {"precision": "ieee"}, "float64, by NumPy's BLAS", "float64, by cuBLAS"),
        ("complex64", {}, "complex64, by NumPy's BLAS", "by residues, where its bound is proved"),
        ("complex64", {"precision": "tf32"}, "by NumPy's BLAS", "as real numbers on tensor cores"),
        ("complex64", {"precision": "ieee"}, "complex64, by NumPy's BLAS", "complex64, by cuBLAS"),
        ("complex128", {}, "complex128, by NumPy's BLAS", "complex128, on INT8 tensor cores"),
        ("complex128", {"precision": "ieee"}, "complex128, by NumPy's BLAS", "complex128, by cu"),
        ("float128", {}, "by NumPy's own loops", "by NumPy's own loops"),
        ("int8", {"dtype": "int32"}, "exact modulo 2^32, on NumPy's BLAS, as float32", "INT8"),
        ("int16", {"dtype": "int64"}, "exact modulo 2^64, on NumPy's", "by 4 products of bytes"),
        ("int8", {"dtype": "float32"}, "exact, rounded once to float32, on NumPy", "tensor cores"),
        ("int64", {}, "exact modulo 2^64, on NumPy's BLAS, as float64", "on cuBLAS, as float64"),
        ("bool", {}, "logical or of ands, on NumPy's BLAS", "logical or of ands, on cuBLAS"),
    ],
)
def test_it_says_how_each_dtype_is_computed(dtype, asked, cpu, gpu):
    side = MatrixSpec((8192, 8192), dtype)
    for cluster, said in ((CPUS, cpu), (GPUS, gpu)):
        plan = multimm.plan(side, side, cluster=cluster, **asked)
        on_gpu = cluster is GPUS
        assert said in arithmetic(plan.layout, plan.precision, gpu=on_gpu)
        assert "\ncomputed" in str(plan)
        assert "precision float32" not in str(plan)


def test_the_picture_shows_who_makes_which_block():
    plan = plan_of(4096, CPUS, blocks=1024, slabs=2048)
    a, b, c = matrices(plan)
    assert [[c.owner(i, j) for j in range(4)] for i in range(4)] == [[0, 1, 0, 1], [2, 3, 2, 3]] * 2
    for i, s in product(range(4), range(2)):
        assert a.owner(i, s) // 2 == i % 2  # in the row of workers that multiplies it
        assert b.owner(s, i) % 2 == i % 2
    page = assert_page(plan)
    assert page.seen["path"] == 4 * 3
    assert str(plan) in page.text


def test_pages_show_text_and_do_not_obey_it():
    bad = "<script>alert(1)</script>&\x1b[31m"
    cluster = ClusterSpec.homogeneous(replace(H200, name=bad), 2)
    for made in (plan_of(4096, cluster), cluster):
        page = assert_page(made)
        assert "<script>alert(1)</script>&\\x1b[31m" in page.text
    good, wrong = (
        multimm.verify(x, x.T, c) for x in [np.ones((3, 2))] for c in (x @ x.T, x @ x.T + 1)
    )
    assert "verified" in assert_page(good).text
    assert "WRONG" in assert_page(wrong).text


def test_a_plan_that_does_not_fit_says_so_first():
    tiny = replace(CPUS.slowest, memory_bytes=200_000_000, spills=False)
    plan = plan_of(40_000, ClusterSpec.homogeneous(tiny, 2, LOCAL_TCP), blocks=8192)
    assert not plan.fits
    assert "\nin short   Does not fit. About " in str(plan)
