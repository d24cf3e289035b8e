"""Write the blocks of the documents and docs/figures from the newest records."""

from __future__ import annotations

import argparse

from multimm_benchmarks.records import ROOT
from multimm_benchmarks.report import files
from multimm_benchmarks.report.runs import Runs


def main(arguments: list[str] | None = None) -> int:
    """Write what is outdated; with --check, say what is and return how much."""
    prog = "python -m multimm_benchmarks.report"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    given = parser.parse_args(arguments)
    if ROOT is None:
        parser.error("the documents are in a checkout: multimm report draws elsewhere")
    runs = Runs()
    if not given.check:
        files.update(runs)
        return 0
    outdated = files.outdated(runs)
    for path in outdated:
        print(f"{path}: stale")
    return len(outdated)


if __name__ == "__main__":
    raise SystemExit(main())
