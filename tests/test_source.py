"""Kernel text: assembled once, complete, sensitive to every byte it is made of."""

from __future__ import annotations

import re

import pytest

from multimm.errors import KernelError
from multimm.gpu.elementwise.transpose import TransposeConfig
from multimm.gpu.runtime import kernel_source
from multimm.gpu.simt.configs import REGISTRY, entry_named

GEMM = {
    **entry_named(REGISTRY, "large").config.defines(),
    "TRANS_A": 0,
    "TRANS_B": 1,
    "WIDE_A": 0,
    "WIDE_B": 0,
}
KERNELS = [("sgemm_ffma.cu", GEMM), ("transpose.cu", TransposeConfig(4, 1).defines())]
kernels = pytest.mark.parametrize(("name", "defines"), KERNELS)


def forget():
    """Read kernels/ anew."""
    kernel_source._assemble.cache_clear()
    kernel_source._lines.cache_clear()


@pytest.fixture
def files(monkeypatch):
    """Files in memory in the place of kernels/."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(kernel_source, "_read", lambda path: texts[str(path)])
    forget()
    yield texts
    forget()


@kernels
def test_text_needs_no_include_path(name, defines):
    text = kernel_source.kernel_text(name, defines)
    assert not re.search(r"^\s*#\s*(include|pragma\s+once)", text, re.MULTILINE)
    assert text.count('#line 1 "common/index.cuh"') == 1


@kernels
def test_every_parameter_is_defined_and_used(name, defines):
    text = kernel_source.kernel_text(name, defines)
    required = set(re.findall(r"!defined\((\w+)\)", text))
    assert required == set(defines)
    for key, value in defines.items():
        assert text.count(f"#define {key} {value}\n") >= 1
        assert len(re.findall(rf"\b{key}\b", text)) > 2


def test_same_text_is_the_same_object():
    assert kernel_source.kernel_text(*KERNELS[0]) is kernel_source.kernel_text(*KERNELS[0])


def test_includes_once_with_lines_that_match_the_files(files):
    files["main.cu"] = 'one\n#include "a.cuh"\nthree\n#include "b.cuh"\nfive\n'
    files["a.cuh"] = '#pragma once\n#include "b.cuh"\nin a\n'
    files["b.cuh"] = "#pragma once\nin b\n"
    text = kernel_source.kernel_text("main.cu", {"N": 7})
    assert text.splitlines() == [
        "#define N 7",
        '#line 1 "main.cu"', "one",
        '#line 1 "a.cuh"', "",
        '#line 1 "b.cuh"', "", "in b",
        '#line 3 "a.cuh"', "in a",
        '#line 3 "main.cu"', "three",
        '#line 5 "main.cu"', "five",
    ]  # fmt: skip


def test_every_byte_of_a_header_counts(files):
    files.update({"main.cu": '#include "a.cuh"\n', "a.cuh": "first\n"})
    before = kernel_source.kernel_text("main.cu", {})
    files["a.cuh"] = "First\n"
    forget()
    assert kernel_source.kernel_text("main.cu", {}) != before


def test_missing_file_is_named():
    with pytest.raises(KernelError, match=r"'nowhere\.cu' was not found"):
        kernel_source.kernel_text("nowhere.cu", {})
