"""What the reference lists is gathered from multimm itself, so that nothing is missing."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


class PublicNames(SphinxDirective):
    """All public names of a module but its submodules, as autodoc shows them."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes that autodoc makes of each."""
        (name,) = self.arguments
        module, lines = import_module(name), StringList()
        for public in getattr(module, "__all__", dir(module)):
            found = getattr(module, public)
            defined = hasattr(module, "__all__") or getattr(found, "__module__", "") == name
            if public.startswith("_") or inspect.ismodule(found) or not defined:
                continue
            kind = "function" if inspect.isroutine(found) else "data"
            if inspect.isclass(found):
                kind = "exception" if issubclass(found, Exception) else "class"
            members = ["   :members:"] * (kind == "class")
            for line in (f".. auto{kind}:: {name}.{public}", *members, ""):
                lines.append(line, f"{name}.{public}", 0)
        node = nodes.section(document=self.state.document)
        self.state.nested_parse(lines, 0, node)
        return node.children


class Messages(SphinxDirective):
    """The messages of an error class, from the calls that make it; "..." stands for values."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A list of them, in the order of the alphabet."""
        (name,) = self.arguments
        items = nodes.bullet_list()
        for message in sorted(messages(name), key=str.casefold):
            items += nodes.list_item("", nodes.paragraph("", message))
        if not items.children:
            raise self.error(f"no message of {name}: is there such an error?")
        return [items]


def messages(name: str) -> set[str]:
    """The texts that errors of one class are made with."""
    found = set()
    for path in (ROOT / "multimm").rglob("*.py"):
        text = path.read_text("utf-8")
        if f"{name}(" not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) == name:
                found.add(template(call.args[0]))
    return found - {""}


def template(node: ast.expr) -> str:
    """A string literal with "..." for what is filled in; empty for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(text.split())
        case ast.JoinedStr(values=parts):
            texts = [str(x.value) if isinstance(x, ast.Constant) else "..." for x in parts]
            whole = " ".join("".join(texts).split())
            return whole if whole.strip(". ") else ""
    return ""


def spread(app: Sphinx, env: object, names: list[str]) -> None:
    """Put notebooks at both ends of the list: two processes read it from there."""
    slow = [name for name in names if name.startswith("docs/notebooks/")]
    rest = [name for name in names if name not in slow]
    names[:] = slow[::2] + rest + slow[1::2]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls it with each build."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("messages", Messages)
    app.connect("env-before-read-docs", spread)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
