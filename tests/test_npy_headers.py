"""Headers of .npy files: those that others wrote, and what other threads do meanwhile."""

from __future__ import annotations

import math

import numpy as np
import pytest

from multimm import io
from multimm.errors import FileFormatError


def test_npy_is_read_while_other_threads_parse_python(tmp_path, monkeypatch):
    """CPython 3.11.7 parses wrongly where another thread does, too: gh-106905."""
    path, parse, fails = tmp_path / "m.npy", np.lib.format.read_array_header_1_0, [True, True]
    np.save(path, np.arange(12.0).reshape(3, 4))

    def disturbed(file):
        found = parse(file)
        if fails:
            raise SystemError(fails.pop())
        return found

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", disturbed)
    assert io.open_array(path).shape == (3, 4)
    assert not fails


@pytest.mark.parametrize(
    ("shape", "written"),
    [
        ((), "{'descr': '<f8', 'fortran_order': False, 'shape': ()}"),
        ((5,), "{'descr':'<f8','fortran_order':False,'shape':(5,),}"),
        ((5,), "{'shape': (5,), 'fortran_order': False, 'descr': \"<f8\"}"),
        ((2, 3), "{'descr': '<f8', 'fortran_order': False, 'shape': (2,3), }     \n"),
        ((5,), "{'descr': '<f8', 'fortran_order': False, 'shape': (5), }"),
        ((5,), "{'descr': '<f8', 'fortran_order': 0, 'shape': (5,), }"),
        ((5,), "{'descr': '<z8', 'fortran_order': False, 'shape': (5,), }"),
        ((5,), "{'descr': '<f8', 'fortran_order': False, 'shape': (5,), 'more': 1}"),
    ],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1)])
def test_headers_of_other_writers_are_read_as_numpy_reads_them(tmp_path, version, shape, written):
    path = tmp_path / "m.npy"
    size = len(written).to_bytes(2 if version[0] == 1 else 4, "little")
    values = np.arange(math.prod(shape) * 1.0)
    path.write_bytes(b"\x93NUMPY" + bytes(version) + size + written.encode() + values.tobytes())
    try:
        expected = np.load(path)
    except ValueError:
        with pytest.raises(FileFormatError, match=r"not a readable \.npy"):
            io.open_array(path)
        return
    if shape:
        np.testing.assert_array_equal(io.open_array(path), expected)
