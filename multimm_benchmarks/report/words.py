"""The words of the report, each explained once, and links to them where they stand."""

from __future__ import annotations

import html
import re
from typing import NamedTuple


class Word(NamedTuple):
    """A term: how it is spelled, as a regular expression, and what it means, in Markdown."""

    name: str
    spelled: str
    meaning: str


WORDS = (
    Word("accuracy of FP32, of TF32", r"accuracy(?: of)?|of (?:FP|TF)(?:32|64) accuracy",
         "Products are compared with others that keep the same bound of error: that of a float32 "
         "sum of float32 products, or that of TF32; those of float64 (FP64) with each other."),
    Word("AtA", "AtA", "The product of a tall matrix by its own transpose. Half of it is computed, "
         "and rates count all of it."),
    Word("awkward", "[Aa]wkward", "Sizes that are no multiples of anything, and unusual layouts."),
    Word("block", "blocks?", "A rectangle of a matrix that one task works with."),
    Word("bytes received", "(?:GB|bytes) (?:received|predicted)|received|[Bb]ytes",
         "Parts of matrices that workers get from each other. They are counted where they arrive; "
         "the plan predicts them before."),
    Word("case", "cases?", "A product that is timed. Its first word says what it shows: `strong` "
         "and `weak` scaling, `tall` and `rectangular` matrices, operands in `chunked` form, in "
         "`host` memory, or `steady` runs in a row. Sizes follow."),
    Word("chunks", "chunks?|chunked", "Parts of a Dask array as its owner made them."),
    Word("copy", "copy|copies", "Copying large arrays on the same device: as fast as memory is."),
    Word("cuBLAS", "cuBLAS(?:Xt|Lt)?|cublas(?:Lt|Sgemv)", "NVIDIA's library of matrix products. "
         "cuBLASXt takes operands in host memory. cublasLt lets the caller choose algorithms."),
    Word("CuPy", "CuPy", "Arrays on one GPU, multiplied by cuBLAS."),
    Word("dask.array", r"dask\.array", "Dask's own product, on the same workers."),
    Word("FP16", "FP16", "Numbers of 16 bits. They are what tensor cores multiply fastest."),
    Word("FP32, float32", "FP32|float32", "Numbers of 32 bits, and arithmetic with them. multimm "
         "in `float32`, its default, keeps the error bound of FP32 arithmetic."),
    Word("FP64, float64", "FP64|float64", "Numbers of 64 bits, and arithmetic with them. multimm "
         "in `float64` multiplies float64 numbers, and keeps the error bound of FP64 arithmetic."),
    Word("flops per byte", "flops per byte", "Multiplications and additions for each byte that is "
         "read or written at least."),
    Word("first task", "first task(?: after)?", "When work begins: planning, building tasks and "
         "handing them out lie before."),
    Word("GB/s", "GB/s", "10^9 bytes a second, read and written."),
    Word("geometric mean", "geometric mean", "The n-th root of the product of n ratios."),
    Word("GFLOP/J", "GFLOP/J", "10^9 operations for each joule of energy."),
    Word("ieee", "ieee", "multimm with `precision=\"ieee\"`: plain FP32 multiply-adds, without "
         "tensor cores."),
    Word("ideal, own rate", "ideal|own rates?", "The sum of what every worker reaches on its own, "
         "with all of them running."),
    Word("JAX, XLA", r"JAX|XLA(?: \w+)?", "Google's arrays and their compiler. HIGHEST asks it for "
         "float32's accuracy; by default it uses TF32."),
    Word("kernel", "kernels?", "A program that runs on a GPU."),
    Word("ladder, rung", "[Ll]adder|rungs?", "Seven kernels that compute the same product, each "
         "with one idea more than the one before."),
    Word("limited by", "limited by", "What takes longest of what runs at the same time."),
    Word("m, n, k", "m x n x k|m|n|k", "Rows of the result, its columns, and terms of each sum."),
    Word("MHz and W", "MHz|W", "Clock of the GPU, and electrical power, under load."),
    Word("NN, NT, TN, TT", "NN|NT|TN|TT", "How the two operands are stored: N as they are, T "
         "transposed."),
    Word("NumPy", "NumPy", "Arrays on a CPU, multiplied by BLAS on all cores."),
    Word("NVLink, InfiniBand", "NVLink|InfiniBand", "Lines between GPUs of one host, and between "
         "hosts."),
    Word("packed", "packed(?: before)?|[Pp]acking|pack", "Written as scaled FP16 numbers for the "
         "tensor cores. Each product does it, or it was done *before* for many."),
    Word("peak", "peak(?: GB of a (?:GPU|worker))?", "The most memory in use at once."),
    Word("peer", "peers?", "Another system that was measured on the same machine."),
    Word("precision", "precision", "What multimm was asked for: `float32`, `ieee` or `tf32` of "
         "float32 operands, `float64` of float64 ones."),
    Word(
        "predicted", "predicted|predictions?|Predicted|Predictions?|planner",
        "By multimm's plan, before anything runs.",
    ),
    Word("relative error", "relative error|[Ee]rrors?", "The largest difference from a product in "
         "float64, divided by the largest element. In tables of accuracy: in units of u |A||B|, u "
         "being 2^-24, and 2^-53 of float64; first the largest, then the root mean square."),
    Word("strong scaling", "[Ss]trong scaling|strong", "The same product on more workers."),
    Word("sustained", "[Ss]ustained", "Repeated for seconds without a pause, so that the GPU is as "
         "warm as it gets."),
    Word("system", "systems?", "What multiplied: multimm, or a peer. The table of systems says how "
         "each was configured."),
    Word("task", "tasks?", "What Dask hands to a worker at a time."),
    Word("tensor cores", "tensor cores?", "Units of a GPU for products of small matrices."),
    Word("TF32", "TF32|tf32", "float32 numbers cut to 11 bits. `tf32` of multimm rounds operands "
         "to 11 bits, too."),
    Word("TFLOP/s, GFLOP/s", "[TG]FLOP/s", "10^12, or 10^9, multiplications and additions a "
         "second, by the definition of the product."),
    Word("times cuBLAS", "x cuBLAS|[Tt]imes cuBLAS|% of cuBLAS", "How many times as fast as "
         "cuBLAS of the same accuracy."),
    Word("timeline", "[Tt]imeline", "What each worker did when, in one run."),
    Word("transfer", "transfers?", "A part of a matrix on its way between workers, or between host "
         "memory and a GPU."),
    Word("weak scaling", "[Ww]eak scaling|weak", "Larger products on more workers: the memory of "
         "each stays the same."),
    Word("worker", "workers?|GPUs?", "A process of Dask that computes: with one GPU, or with some "
         "cores of a CPU."),
    Word("X W", "X W", "A tall matrix by a small one."),
)  # fmt: skip

_SPELLED = re.compile(
    "|".join(rf"(?<![\w/.-])(?P<w{i}>{word.spelled})(?![\w/-])" for i, word in enumerate(WORDS))
)


def anchor(word: Word) -> str:
    """The id of a word's explanation."""
    return "word-" + re.sub(r"\W+", "-", word.name).strip("-").lower()


def linked(text: str, used: set[Word]) -> str:
    """Return HTML in which each word, where it first stands, links to its explanation.

    Parameters
    ----------
    text : str
        HTML. Links and code in it stay as they are.
    used : set of Word
        The words that were found are added.
    """
    here: set[Word] = set()

    def link(found: re.Match[str]) -> str:
        word = WORDS[int((found.lastgroup or "w0")[1:])]
        if word in here:
            return found[0]
        here.add(word)
        return f'<a href="#{anchor(word)}">{found[0]}</a>'

    parts, inside = re.split(r"(<[^>]*>)", text), 0
    for i, part in enumerate(parts):
        if i % 2:
            inside += bool(re.match("<(a|code)[ >]", part)) - (part in ("</a>", "</code>"))
        elif not inside:
            parts[i] = _SPELLED.sub(link, part)
    used |= here
    return "".join(parts)


def explained(used: set[Word]) -> str:
    """Return the list of the words that were used, as HTML."""
    rows = []
    for word in WORDS:
        if word in used:
            meaning = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(word.meaning, False))
            meaning = re.sub(r"\*([^*]*)\*", r"<em>\1</em>", meaning)
            rows.append(
                f'<dt id="{anchor(word)}">{html.escape(word.name)}</dt>\n<dd>{meaning}</dd>\n'
            )
    return f"<dl>\n{''.join(rows)}</dl>\n"
