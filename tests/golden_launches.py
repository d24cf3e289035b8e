"""Golden launches: what calls of `multimm.gpu` put into a stream, kernel by kernel.

`golden/launches.jsonl` has one call a line, in plain values:

    {"on": 90, "do": "gemm", "a": "1024x512", "b": "512x768 F", "precision": "tf32"}

`on` is the compute capability of the GPU (`GPUS`). An array is a shape, and what is not usual about
it: ``F`` for contiguous columns, ``+3`` for rows that lie so many elements further apart, ``@1``
for a first element that lies so many behind an aligned one, ``::2`` for every second column,
``rep`` for rows that are one row in memory, ``f8`` for float64, ``c8`` for complex64; ``a`` is the
same array as `a`.
Nothing is computed: arrays have addresses that nobody reads. What was launched stands behind each
call: memory that is set, copied or taken, and kernels, with grid, block, shared memory and
arguments. An address is the name of an array and a distance in bytes from its beginning.

    python tests/golden_launches.py              compares today's launches with the file's
    python tests/golden_launches.py --rewrite    and writes them to it
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in import Stream, forget

from multimm.gpu import complex_gemm, kernel_selection, product
from multimm.gpu.elementwise.reduce import add_partials
from multimm.gpu.elementwise.transpose import transpose
from multimm.gpu.emulated.pack import pack
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.runtime import launch

FILE = Path(__file__).parent / "golden" / "launches.jsonl"
#: Multiprocessors by compute capability: T4, A100, RTX 4090, H100.
GPUS = {75: 40, 80: 108, 89: 128, 90: 132}
#: Bytes between the beginnings of two arrays; no address of one is another's.
APART = 2**44

Call = dict[str, Any]


class Array(np.ndarray):
    """As a CuPy array, at an address where nothing is."""

    __module__ = "cupy"

    def __new__(cls, shape: Any, dtype: Any) -> Array:
        return recorder.take(shape, dtype)

    def __repr__(self) -> str:
        return f"<array of shape {self.shape}>"  # there are no values to show

    @property
    def device(self) -> Device:
        return Device(0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)

    def copy(self, order: str = "C") -> Array:
        return recorder.laid(self)

    def get(self, stream: object) -> np.ndarray:
        """On the host: nothing was counted."""
        return np.zeros(self.shape, self.dtype)


class Device(contextlib.nullcontext):
    """The one device, of a kind that the recorder knows."""

    def __init__(self, ident: int) -> None:
        super().__init__()
        self.id = ident

    @property
    def compute_capability(self) -> str:
        return str(recorder.on)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": GPUS[recorder.on]}


class Recorder:
    """What was put into the stream."""

    def __init__(self) -> None:
        self.on, self.names, self.events = 90, [], []

    def new(
        self, shape: Any, dtype: Any, name: str = "", strides: Any = None, at: int = 0
    ) -> Array:
        """An array at the next address."""
        self.names.append(name)
        shape, dtype = (shape if isinstance(shape, tuple) else (shape,)), np.dtype(dtype)
        interface = {
            "data": (len(self.names) * APART + at, False), "shape": shape, "typestr": dtype.str,
            "strides": strides, "version": 3,
        }  # fmt: skip
        return np.asarray(SimpleNamespace(__array_interface__=interface)).view(Array)

    def take(self, shape: Any, dtype: Any) -> Array:
        """Memory of the pool."""
        name = f"m{sum(name.startswith('m') for name in self.names)}"
        size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
        self.events.append(f"take {name} {size}")
        return self.new(shape, dtype, name)

    def laid(self, x: Array, order: str = "C") -> Array:
        """A copy of an array."""
        made = self.take(x.shape, x.dtype)
        self.events.append(f"lay {self.place(x.data.ptr)} {'x'.join(map(str, x.shape))}")
        return made

    def place(self, value: Any) -> Any:
        """An argument in plain values."""
        if isinstance(value, np.ndarray):
            words = np.frombuffer(value.tobytes(), "u8").tolist()
            while words and words[-1] == 0:
                words.pop()
            return [self.place(word) for word in words]
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, int) and number >= APART:
            index, distance = divmod(number, APART)
            return self.names[index - 1] + (f"+{distance}" if distance else "")
        return number

    def load(self, text: str, entry: str, file: str, capability: int, specific: bool) -> Any:
        """In the place of a kernel."""
        found = re.findall(r"^#define (\w+) (\d+)$", text.partition("#line")[0], re.M)
        defines = " ".join(f"{name}={value}" for name, value in found)
        kernel = SimpleNamespace(max_dynamic_shared_size_bytes=0)

        class Launched:
            def __setattr__(self, name: str, value: int) -> None:
                setattr(kernel, name, value)

            def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
                values = [recorder.place(x) for x in args]
                allowed = kernel.max_dynamic_shared_size_bytes
                assert max(shared_mem, 48 << 10) == max(allowed, 48 << 10)
                recorder.events.append(
                    [entry, defines + specific * " specific", [*grid], [*block], shared_mem, values]
                )

        return Launched()


recorder = Recorder()


def fake_cupy() -> ModuleType:
    """What the launchers use of CuPy."""
    module, runtime = ModuleType("cupy"), SimpleNamespace()
    events = recorder.events.append
    runtime.getDevice = lambda: 0
    runtime.streamIsCapturing = lambda stream: False
    runtime.memsetAsync = lambda at, byte, size, _: events(
        f"set {recorder.place(at)} {byte} {size}"
    )
    runtime.memcpyAsync = lambda to, at, size, *_: events(
        f"copy {recorder.place(to)} {recorder.place(at)} {size}"
    )
    module.empty = module.zeros = recorder.take
    module.ascontiguousarray = recorder.laid
    module.array = lambda x, order, copy: recorder.laid(x)
    module.asnumpy = lambda x: np.zeros(x.shape, x.dtype)
    module.broadcast_to = lambda x, shape: np.broadcast_to(x, shape, subok=True)
    module.copyto = lambda to, x: events(
        f"assign {recorder.place(to.data.ptr)} {recorder.place(x.data.ptr)}"
    )
    module.ndarray = Array
    module.cuda = SimpleNamespace(Device=Device, get_current_stream=Stream, runtime=runtime)
    return module


@contextlib.contextmanager
def recording(on: int = 90) -> Iterator[Recorder]:
    """Nothing is launched, but written down, as on a GPU of a compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        recorder.on, recorder.names, recorder.events = on, [], []
        patch.setitem(sys.modules, "cupy", fake_cupy())
        patch.setattr(launch, "_loaded", recorder.load)
        forget()
        yield recorder
    forget()


def array(text: str, name: str) -> Array:
    """An array as the file describes it."""
    shape_text, *words = text.split()
    shape = tuple(map(int, shape_text.split("x")))
    dtype = np.dtype(next((word for word in words if word in ("f2", "f8", "c8")), "f4"))
    columns, step, at, extra, repeated = "F" in words, 1, 0, 0, "rep" in words
    for word in words:
        if word.startswith("+"):
            extra = int(word[1:])
        elif word.startswith("@"):
            at = int(word[1:]) * dtype.itemsize
        elif word.startswith("::"):
            step = int(word[2:])
    inner = shape[:-3:-1] if columns else shape[-2:]
    steps = [0 if repeated else inner[1] * abs(step) + extra, step]
    strides = [*(steps[::-1] if columns else steps)]
    reach = (inner[1] * abs(step) + extra) * inner[0]
    for size in reversed(shape[:-2]):
        strides.insert(0, reach)
        reach *= size
    return recorder.new(shape, dtype, name, tuple(x * dtype.itemsize for x in strides), at)


def block(text: str, side: str) -> PackedBlock:
    """A packed operand: rows, k and scheme; ``raw`` has its source, ``odd`` residuals."""
    shape, scheme, *words = text.split()
    rows, k = map(int, shape.split("x"))
    if "raw" in words:
        raw = array(f"{rows}x{k}" if side == "a" else f"{k}x{rows}", side)
        return PackedBlock(rows, k, side, scheme, nonfinite=1, raw=raw)
    height = -(-rows // 128) * 128
    tiles = (height // 64, -(-k // 64), 2 if scheme == "float32" else 1, 64, 64)
    odd = 3 * ("odd" in words)
    lists = recorder.new((odd,), "u8", f"{side}p"), recorder.new((odd,), "f4", f"{side}v")
    return PackedBlock(
        rows, k, side, scheme, recorder.new(tiles, "f2", side),
        recorder.new((height,), "i4", f"e{side}"), 0, odd, *(lists if odd else ()),
    )  # fmt: skip


def run(call: Call) -> None:
    """Do what a call says, with arrays that are made before."""
    call = {name: value for name, value in call.items() if name != "on"}
    do = call.pop("do")
    named = {}
    for name in ("a", "b", "c", "partial", "out"):
        if name in call:
            text = call.pop(name)
            packed = " float32" in text or " tf32" in text
            named[name] = block(text, name) if packed else array(text, name) if text != "a" else (
                named["a"])  # fmt: skip
    if do == "gemm":
        a, b = named.pop("a"), named.pop("b")
        call |= named
        product.gemm(a, b, **call)
    elif do == "complex":
        complex_gemm.gemm(named.pop("a"), named.pop("b"), **named, **call)
    elif do == "pack":
        pack(named["a"], **call)
    elif do == "transpose":
        transpose(named.pop("a"), **named)
    else:
        parts = [array(text, f"part{i}") for i, text in enumerate(call.pop("parts"))]
        add_partials(parts, **named, **call)


def launched(call: Call) -> dict[str, Any]:
    """What a call launches, and what `last_choice` says of it; a second call does the same."""
    with recording(call["on"]) as found:
        run(call)
        does: dict[str, Any] = {"launches": found.events[:]}
        if call["do"] in ("gemm", "complex"):
            does["choice"] = kernel_selection.last_choice()
        found.events.clear()
        found.names.clear()
        run(call)
        assert found.events == does["launches"], f"{call}: the second time {found.events}"
    return does


def read() -> list[tuple[Call, dict[str, Any]]]:
    """Calls, and what they launch; of a new call, nothing."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    variants = lines[0]["kernels"]
    return [(line["call"], _named(line.get("does", {}), variants)) for line in lines[1:]]


def _named(does: dict[str, Any], variants: list[str]) -> dict[str, Any]:
    return does | {
        "launches": [
            event if isinstance(event, str) else [*variants[event[0]].split(" ", 1), *event[1:]]
            for event in does.get("launches", ())
        ]
    }


def write(found: list[tuple[Call, dict[str, Any]]]) -> None:
    """Write the file: kernels and their parameters stand once, at its beginning."""
    variants: dict[str, int] = {}

    def short(event: Any) -> Any:
        if isinstance(event, str):
            return event
        entry, defines, *rest = event
        return [variants.setdefault(f"{entry} {defines}", len(variants)), *rest]

    lines = []
    for call, does in found:
        lines.append({"call": call, "does": does | {"launches": [*map(short, does["launches"])]}})
    text = [{"kernels": [*variants]}, *lines]
    FILE.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in text))


def compare() -> list[tuple[Call, dict[str, Any], dict[str, Any]]]:
    """Calls that launch something else than the file says: then and now."""
    plain = [(call, old, json.loads(json.dumps(launched(call)))) for call, old in read()]
    return [(call, old, new) for call, old, new in plain if old != new]


def main(arguments: list[str]) -> int:
    """From the command line; the status is 1 where a launch differs and the file stays."""
    if set(arguments) - {"--rewrite"}:
        print(__doc__)
        return 2
    if arguments:
        found = [(call, launched(call)) for call, _ in read()]
        write(found)
        print(f"{len(found)} calls written to {FILE}")
        return 0
    different = compare()
    for call, old, new in different[:10]:
        print(json.dumps(call), json.dumps(old), json.dumps(new), sep="\n  ")
    print(f"{len(different)} of {len(read())} calls differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
