"""What `import multimm` loads, and which way the imports between its modules point."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest
from commands import python

import multimm

ROOT = Path(multimm.__file__).parent
#: Loaded by the function that needs them, not by the import.
HEAVY = {"cupy", "dask_cuda", "distributed", "rmm", "ucxx", "zarr", "h5py", "click", "rich"}
#: Stand at the top of no module, because the package works without them.
OPTIONAL = {"cupy", "cupyx", "dask_cuda", "rmm", "ucxx", "numba", "zarr", "h5py", "sklearn"}

#: Part of the package -> the parts that it may import besides itself and `errors`.
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {
        "__init__",
        "cluster",
        "display",
        "failures",
        "files",
        "gpu",
        "io",
        "planning",
        "settings",
    },
    "__init__": {"api", "checks", "cluster", "contractions", "dispatch", "gpu", "io"},
    "dispatch": {"acceleration_report", "entries", "graph", "operands"},
    "entries": {"acceleration_report", "api", "contractions", "gpu", "operands", "settings"},
    "acceleration_report": set(),
    "api": {
        *("contractions", "operands", "products", "result_chunks", "shapes"),
        *("graph", "planning", "gpu"),
    },
    "contractions": {
        *("display", "operands", "products", "result_chunks", "settings", "shapes"),
        *("graph", "planning", "gpu"),
    },
    "result_chunks": {"operands", "planning", "settings", "shapes"},
    "products": {
        *("operands", "result_chunks", "shapes"),
        *("graph", "cluster", "planning", "gpu"),
    },
    "checks": {
        *("blocks", "contractions", "display", "failures", "operands", "shapes", "sources"),
        *("gpu", "graph", "cluster"),
    },
    "io": {"files", "operands", "planning"},
    "files": {"failures", "gpu", "graph", "planning", "settings", "shapes"},
    "cluster": {"display", "operands", "graph", "gpu", "planning", "settings"},
    "graph": {"blocks", "display", "failures", "shapes", "planning", "gpu"},
    "gpu": {"blocks", "shapes"},
    "operands": {"blocks", "gpu", "sources"},
    "sources": {"blocks", "settings", "shapes"},
    "planning": {"display", "shapes"},
    "blocks": set(),
    "display": set(),
    "failures": set(),
    "shapes": set(),
    "settings": {"shapes"},
    "errors": set(),
}
#: Folder inside of a part -> the folders beside it, and the other parts, that it may import. The
#: modules that a part has beside its folders may use them and be used: no circle may come of it.
FOLDERS: dict[str, set[str]] = {
    "cluster.inspect": {"planning", "gpu"},
    "cluster.calibration": {"cluster.inspect", "cluster.plugins", "planning", "graph", "gpu"},
    "cluster.plugins": {"cluster.inspect", "graph", "gpu"},
    "files.output": set(),
    "graph.tasks": {"blocks", "failures", "shapes", "planning", "gpu"},
    "graph.lowering": {"graph.tasks", "shapes", "planning", "gpu"},
    "graph.scheduler": {"display", "failures", "planning"},
    "gpu.runtime": {"shapes"},
    "gpu.transfer": set(),
    "gpu.elementwise": {"gpu.runtime", "shapes"},
    "gpu.simt": {"gpu.runtime", "gpu.elementwise"},
    "gpu.emulated": {"gpu.runtime", "gpu.elementwise", "gpu.simt", "shapes"},
    "gpu.integers": {"gpu.runtime", "gpu.emulated"},
    "gpu.residues": {"gpu.runtime", "gpu.emulated"},
    "planning.tiling": set(),
    "planning.work": {"planning.tiling", "shapes"},
    "planning.cost": {"planning.tiling", "planning.work"},
    "planning.explain": {"display", "planning.tiling", "planning.cost"},
    "planning.candidates": {"planning.tiling", "planning.work", "planning.cost"},
}
#: A folder with more is one that nobody can look over.
MOST_MODULES = 16
#: What Dask and distributed offer to everybody. Their other modules may change with any release.
PUBLIC = {
    *("dask", "dask.array", "dask.array.core", "dask.base", "dask.sizeof", "dask.utils"),
    "distributed",
}
#: Who imports those others, besides `graph` and `cluster`: each no more than what it is about.
INTERNALS = {
    "multimm.files.graph": {"dask._task_spec", "dask.highlevelgraph"},
    "multimm.gpu.emulated.packed": {
        "distributed.protocol.cuda",
        "distributed.protocol.serialize",
    },
    "multimm.entries": {"dask.array.einsumfuncs", "dask.array.linalg", "dask.array.routines"},
}
MODULES = sorted(path for path in ROOT.rglob("*.py") if "cuda" not in path.parts)


def module_name(path: Path) -> str:
    names = ("multimm", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(names)


def short_name(path: Path) -> str:
    """Of a module as others import it: files/__init__.py -> files."""
    return module_name(path).removeprefix("multimm.").removesuffix(".__init__")


def part_of(dotted: str) -> str:
    """The part of the package that a name belongs to: multimm.graph.array -> graph."""
    name = dotted.split(".")[1] if "." in dotted else "__init__"
    # `from multimm import matmul` asks the package itself.
    is_module = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
    return name if is_module else "__init__"


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported; names taken from `multimm` itself one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "multimm":
            yield from (f"multimm.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@cache
def tree_of(path: Path) -> ast.Module:
    """A module; not to be changed."""
    return ast.parse(path.read_text())


def ours(path: Path) -> set[str]:
    """What a module imports of multimm."""
    found = imports(tree_of(path))
    return {name for name in found if name.partition(".")[0] == "multimm"}


@cache
def imported_modules() -> dict[str, set[str]]:
    """Module -> the modules of multimm that it imports when it runs, in functions too."""
    known = {short_name(path): path for path in MODULES}
    found = {}
    for name, path in known.items():
        used = set()
        for node in ast.walk(_WithoutTyping().visit(ast.parse(path.read_text()))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multimm"):
                package = node.module.removeprefix("multimm").strip(".")
                taken = {f"{package}.{alias.name}".strip(".") for alias in node.names}
                used |= {one if one in known else package for one in taken}
            elif isinstance(node, ast.Import):
                ours = (a.name for a in node.names if a.name.startswith("multimm."))
                used |= {one.removeprefix("multimm.") for one in ours}
        found[name] = used & known.keys() - {name}
    return found


class _WithoutTyping(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def folder_of(name: str) -> str:
    """The folder inside of a part that a module lies in: gpu.simt.gemm -> gpu.simt."""
    inside = ".".join(name.split(".")[:2])
    return inside if inside in FOLDERS else ""


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules each of which imports all others, through any number of them."""
    reached = {}
    for start in graph:
        seen, ahead = set(), [start]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[start] = seen
    found = {frozenset(x for x in reached[one] if one in reached[x]) for one in graph}
    return [set(one) for one in sorted(found, key=sorted) if one]


def of_dask(tree: ast.AST) -> Iterator[str]:
    """The modules of Dask and distributed that are imported, whole or in part."""
    known = {"dask", "distributed"}
    yield from (name for name in imports(tree) if name.partition(".")[0] in known)
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.partition(".")[0] in known:
            for alias in node.names:
                if ismodule(getattr(import_module(module), alias.name, None)):
                    yield f"{module}.{alias.name}"


def test_imports_point_downwards():
    upwards = set()
    for path in MODULES:
        part = part_of(module_name(path))
        assert part in ALLOWED, f"multimm.{part} has no place in the layout: give it one here"
        allowed = ALLOWED[part] | {part, "errors"}
        upwards |= {(module_name(path), x) for x in ours(path) if part_of(x) not in allowed}
    assert not upwards


def test_two_commands_alone_know_the_benchmarks():
    known = {
        module_name(path)
        for path in MODULES
        for name in imports(tree_of(path))
        if name.partition(".")[0] == "multimm_benchmarks"
    }
    assert known == {"multimm.cli.bench", "multimm.cli.report"}


def test_every_import_that_is_allowed_exists():
    used = {part: set() for part in ALLOWED}
    for path in MODULES:
        used[part_of(module_name(path))] |= set(map(part_of, ours(path)))
    unused = {part: sorted(ALLOWED[part] - used[part]) for part in ALLOWED}
    assert not any(unused.values()), {part: names for part, names in unused.items() if names}


def test_no_module_imports_itself_through_others():
    assert not circles(imported_modules())


def test_folders_import_what_lies_below_them():
    upwards = set()
    for name, used in imported_modules().items():
        own = folder_of(name)
        for other in used if own else ():
            part = part_of(f"multimm.{other}")
            layer = folder_of(other) if part == part_of(f"multimm.{name}") else part
            if layer not in FOLDERS[own] | {own, "errors", ""}:
                upwards.add((name, other))
    assert not upwards


def test_every_folder_of_a_part_has_its_place():
    folders = {f"{path.parent.parent.name}.{path.parent.name}" for path in MODULES
               if path.parent.parent.parent == ROOT}  # fmt: skip
    assert folders == FOLDERS.keys()


def test_no_folder_has_more_modules_than_can_be_looked_over():
    counts = Counter(path.parent for path in MODULES)
    assert {str(at): n for at, n in counts.items() if n > MOST_MODULES} == {}


def test_graph_and_cluster_alone_know_the_internals_of_dask():
    elsewhere = {
        module_name(path): set(of_dask(tree_of(path))) - PUBLIC
        for path in MODULES
        if part_of(module_name(path)) not in ("graph", "cluster")
    }
    assert {name: used for name, used in elsewhere.items() if used} == INTERNALS


def test_planning_knows_neither_dask_nor_numpy_nor_cuda():
    for path in (ROOT / "planning").rglob("*.py"):
        names = {name.split(".")[0] for name in imports(tree_of(path))}
        assert not names & {"dask", "distributed", "cupy", "numpy"}, path


def modules_after(statement: str) -> set[str]:
    """Names of all modules loaded by a fresh interpreter that runs `statement`."""
    run = python("-c", f"{statement}\nimport sys; print(*sys.modules)", check=True)
    return set(run.stdout.split())


def test_import_multimm_loads_itself_only():
    added = modules_after("import multimm") - modules_after("pass")
    assert {name.split(".")[0] for name in added} & (HEAVY | {"dask", "numpy"}) == set()


def test_the_public_names_load_nothing_heavy():
    # dask.array itself imports CuPy where it is installed; the rest would be ours.
    names = [*multimm.__all__]
    statement = "import multimm; " + "; ".join(f"multimm.{name}" for name in names)
    added = modules_after(statement) - modules_after("import dask.array")
    assert {"multimm.api", "multimm.checks.verify", "multimm.cluster"} <= added
    assert not added & HEAVY


@pytest.mark.parametrize(
    "name", ["cluster.start", "errors.ShapeError", "gpu.pack", "io.open_array"]
)
def test_one_import_is_enough(name):
    """Not only where something else has imported the module before."""
    assert f"multimm.{name.split('.')[0]}" in modules_after(f"import multimm; multimm.{name}")


PACKAGES = ["multimm", "multimm.cluster", "multimm.gpu", "multimm.io"]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there_and_no_others(name):
    package = import_module(name)
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, public) is not None for public in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        package.matmull  # noqa: B018


def test_public_names_are_the_same_whatever_was_imported_before():
    statement = f"import {', '.join(PACKAGES)}; before = [*map(dir, ({', '.join(PACKAGES)},))]"
    use = "multimm.cluster.start, multimm.gpu.pack, multimm.io.Output, multimm.matmul"
    modules_after(f"{statement}; {use}; assert before == [*map(dir, ({', '.join(PACKAGES)},))]")


def test_all_modules_are_imported_without_optional_packages():
    # None in sys.modules makes an import fail, whatever is installed.
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))"
    names = {f"multimm.{short_name(path)}" for path in MODULES} - {
        "multimm.__main__",
        "multimm.__init__",
        "multimm.gpu.transfer.compiled_loops",  # by Numba, as it is imported
    }
    assert names <= modules_after(f"{block}; import {', '.join(sorted(names))}")
