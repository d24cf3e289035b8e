"""Plans are the golden ones, to what is predicted, counted and held: see `golden_plans`.

python tests/golden_plans.py --rewrite    after a plan became better, or is meant to change
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from golden_plans import Change, compare, read, summary

import multimm


def test_plans_are_the_golden_ones():
    """Better ones are written to the file: a cost that is forgotten makes all look better."""
    changes = compare()
    assert all(change.old for change in changes), "rewrite the file: problems without a plan"
    if any(change.seen for change in changes):
        pytest.fail(summary(changes) + "\nIf that is meant, rewrite the file", pytrace=False)


def test_golden_plans_are_of_all_kinds_and_no_problem_is_there_twice():
    problems = [problem for problem, _ in read()]
    assert len(problems) == len({str(problem) for problem in problems}) >= 300
    workers = Counter(int(problem["on"].split()[0]) for problem in problems)
    assert workers.keys() == {*range(1, 9)}
    refused = sum(plan.get("refused", False) for _, plan in read())
    assert 10 < refused < 100


def test_no_plan_depends_on_a_clock_or_on_chance():
    """Everybody gets the same plans, and the same words where one is refused."""
    files = sorted((Path(multimm.__file__).parent / "planning").rglob("*.py"))
    assert files
    for file in files:
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        names = {x.name for node in nodes if isinstance(node, ast.Import) for x in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not names & {"time", "datetime", "random", "secrets", "uuid", "os"}, file


PLAN = {"seconds": 1.0, "bytes": 1000, "memory": 1000, "tasks": 4, "grid": "1x1x1", "chunks": "1*9"}


@pytest.mark.parametrize(
    ("new", "worse", "seen"),
    [
        ({"chunks": "2*5"}, False, True),
        ({"seconds": 1.0009}, False, False),
        ({"seconds": 1.0011}, True, True),
        ({"seconds": 0.9989}, False, True),
        ({"seconds": 0.5, "memory": 1001}, True, True),
        ({"bytes": 999}, False, True),
        ({"refused": True}, True, True),
    ],
)
def test_what_counts_as_worse_and_what_is_seen(new, worse, seen):
    change = Change({}, PLAN, {**PLAN, **new})
    assert (change.worse, change.seen) == (worse, seen)
    assert ("1 plans worse" in summary([change])) == worse
