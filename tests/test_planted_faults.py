"""Planted faults are still where they were planted; `make faults` sees that tests find them."""

from __future__ import annotations

import pytest
from planted_faults import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_changes_the_file_that_it_is_in(fault):
    path = ROOT / "multimm" / fault.file
    text = fault.planted(path.read_text("utf-8"))
    if path.suffix == ".py":
        compile(text, path, "exec")
    for name in fault.arguments:
        assert not name.endswith(".py") or (ROOT / name).exists(), name


def test_there_are_forty_or_more_and_no_two_alike():
    assert len({(x.file, x.old, x.new) for x in FAULTS}) == len(FAULTS) >= 40
