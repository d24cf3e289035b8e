"""Kernel text to host C++: inline PTX becomes calls, and barriers can be left out one by one.

The rest of CUDA C++ is macros and functions of cuda_on_cpu.h. Lines keep their numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
_LITERAL = re.compile(r'"((?:\\.|[^"\\])*)"')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([^;\[\]]*?)(\w+)\s*\[\s*\]\s*;")
_ALIGNMENT = re.compile(r"__align__\s*\([^()]*\)|alignas\s*\([^()]*\)")
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\b[^;{]*?(\w+)\s*\((?=[^()]*\)\s*\{)')
_FUNCTION = re.compile(r"\b(\w+)\s*\([^(){};]*\)\s*(?:const\s*)?\{")
_REGISTER = {"pred": "bool", "f32": "float", "f64": "double", "b32": "unsigned", "u32": "unsigned",
             "s32": "int", "b64": "unsigned long long", "u64": "unsigned long long"}  # fmt: skip
_PTX = "::cuda_on_cpu::ptx::"
_ORDERING = ("cp_async_commit_group", "cp_async_wait_group", "cp_async_wait_all")


@dataclass(frozen=True)
class Site:
    """A barrier, wait or commit that can be left out."""

    number: int
    place: str  #: file, line and text
    of_copies: bool  #: a wait or a commit: idle on chips without asynchronous copies


@dataclass(frozen=True)
class HostText:
    """C++ for the host, its kernels, and what can be left out of them."""

    text: str
    entries: tuple[str, ...]
    sites: tuple[Site, ...]


def host_text(kernel_text: str) -> HostText:
    """Translate what `multimm.gpu.runtime.kernel_source.kernel_text` returns."""
    text = _COMMENT.sub(_without_comment, kernel_text)
    entries = tuple(_ENTRY.findall(text))
    text = _DYNAMIC.sub(_dynamic_array, _replace_asm(text))
    text, sites = _number_sites(text)
    registered = "\n".join(
        f'static const ::cuda_on_cpu::Kernel cuda_on_cpu_{name}("{name}", &{name});'
        for name in entries
    )
    body = f"namespace {{\n{text}\n{registered}\n}}  // namespace\n"
    return HostText(body, entries, tuple(sites))


def _without_comment(match: re.Match[str]) -> str:
    found = match[0]
    return found if found.startswith('"') else " " + "\n" * found.count("\n")


def _dynamic_array(match: re.Match[str]) -> str:
    kind, name = _ALIGNMENT.sub("", match[1]).strip(), match[2]
    return f"{kind}* const {name} = static_cast<{kind}*>(::cuda_on_cpu::dynamic_shared());"


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one before `start`; strings are stepped over."""
    depth, at = 1, start
    while depth:
        if text[at] == '"':
            literal = _LITERAL.match(text, at)
            assert literal, f"unfinished string: {text[at : at + 60]!r}"
            at = literal.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _split(text: str, separator: str) -> list[str]:
    """Split where `separator` stands outside of parentheses and strings."""
    parts, last, at = [], 0, 0
    while at < len(text):
        if text[at] == '"':
            literal = _LITERAL.match(text, at)
            assert literal, text
            at = literal.end()
        elif text[at] == "(":
            at = _closing(text, at + 1) + 1
        else:
            if text[at] == separator:
                parts.append(text[last:at])
                last = at + 1
            at += 1
    return [*parts, text[last:]]


def _replace_asm(text: str) -> str:
    """Replace every asm statement by calls to the functions of cuda_on_cpu::ptx."""
    out, last = [], 0
    for match in _ASM.finditer(text):
        end = _closing(text, match.end())
        inside = text[match.end() : end]
        template, *lists = _split(inside, ":")
        code = "".join(_LITERAL.findall(template)).replace("\\n", "\n").replace("\\t", "\t")
        operands = [
            operand[operand.index("(") :].strip()
            for part in lists[:2]
            for operand in _split(part, ",")
            if operand.strip()
        ]
        lines = "\n" * text.count("\n", match.start(), end)
        out += [text[last : match.start()], f"do {{ {_ptx(code, operands)} }} while (0){lines}"]
        last = end + 1
    return "".join([*out, text[last:]])


def _ptx(code: str, operands: list[str]) -> str:
    """Instructions as C++: ``@p cp.async.wait_group %0;`` is ``if (p) cp_async_wait_group(x);``."""
    out = []
    registers = {
        name.strip()
        for names in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", code)
        for name in names.split(",")
    }
    for name in registers:  # operands are C++ and may have the same names
        code = re.sub(rf"(?<![.%\w]){re.escape(name)}\b", f"ptx_{name}", code)
    for part in code.replace("%%", "%").split(";"):
        statement = part.strip()
        while statement[:1] in ("{", "}"):  # a scope; the braces of a vector stand elsewhere
            out.append(statement[0])
            statement = statement[1:].strip()
        if statement:
            out.append(_instruction(statement, operands))
    return " ".join(out)


def _instruction(statement: str, operands: list[str]) -> str:
    register = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL)
    if register:
        return f"{_REGISTER[register[1]]} {register[2]};"
    guard = re.match(r"@(!?)(\w+)\s+", statement)
    condition = f"if ({guard[1]}{guard[2]}) " if guard else ""
    name, _, rest = statement[guard.end() if guard else 0 :].partition(" ")
    name = re.sub(r"\.L2::\w+", "", name.strip())  # a hint to the cache
    arguments = re.sub(r"[\[\]{}]", "", rest).strip()  # of PTX; operands are C++ and keep theirs
    arguments = re.sub(r"%(\d+)", lambda match: operands[int(match[1])], arguments)
    return f"{condition}{_PTX}{name.replace('::', '_').replace('.', '_')}({arguments});"


def _number_sites(text: str) -> tuple[str, list[Site]]:
    """Put the question ``kept(number)`` before every barrier, wait and commit.

    A wait in a function of its own is left out where that function is called, one call at a time.
    """
    names = {"__syncthreads", "__syncwarp"}
    inline = []
    for match in re.finditer(re.escape(_PTX) + f"(?:{'|'.join(_ORDERING)})\\b", text):
        function = _enclosing_function(text, match.start())
        if _calls(text, {function}):
            names.add(function)
        else:
            inline.append(match.start())
    places = sorted([match.start() for match in _calls(text, names)] + inline)
    sites, out, last = [], [], 0
    for number, place in enumerate(places):
        # A loop, for an "else" may follow that belongs to an "if" before it.
        once = f"for (bool kept = ::cuda_on_cpu::kept({number}); kept; kept = false) "
        out += [text[last:place], once]
        last = place
        statement = " ".join(text[place : text.index(";", place) + 1].split())
        where = f"{_position(text, place)}: {statement.replace(_PTX, '')}"
        sites.append(Site(number, where, "__sync" not in statement))
    return "".join([*out, text[last:]]), sites


def _calls(text: str, names: set[str]) -> list[re.Match[str]]:
    """Statements that call one of the names, be it as a template or a member."""
    name = "|".join(sorted(map(re.escape, names)))
    object_of, parameters = r"(?:\b\w+(?:\.|->|::))*", r"\s*(?:<[^;{}]*?>)?\s*\([^;{}]*\)\s*;"
    return list(re.finditer(rf"{object_of}\b(?:{name})\b{parameters}", text))


def _enclosing_function(text: str, position: int) -> str:
    """Name of the function whose body a position is in."""
    words = {"if", "for", "while", "switch"}
    found = [m[1] for m in _FUNCTION.finditer(text, 0, position) if m[1] not in words]
    return found[-1] if found else ""


def _position(text: str, at: int) -> str:
    """File and line, by the #line directives."""
    directives = list(re.finditer(r'^#line (\d+) "([^"]+)"$', text[:at], re.MULTILINE))
    if not directives:
        return f"line {text.count(chr(10), 0, at) + 1}"
    last = directives[-1]
    return f"{last[2]}:{int(last[1]) + text.count(chr(10), last.end(), at) - 1}"
