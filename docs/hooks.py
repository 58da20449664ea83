r"""Docstrings of the package, made ready for the site.

The docstrings are plain text first: formulas are `.. math::` blocks, and the words around them use
`u_i`, `[u]_+` or `nu*` freely, which Markdown would take for emphasis. This griffe extension turns
formulas into arithmatex delimiters, escapes the rest, links names in backticks to their entry, adds
a link to the source and leaves out private base classes.

It also adds a module `fcco.overview`: for each page of docs/reference/api the table of what it
documents, one line for each class and function. Pages show it by `::: fcco.overview.PAGE`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe

__all__ = ["Docstrings", "to_markdown"]

API = Path(__file__).parent / "reference" / "api"
PAGES = {
    "research/details/mathematics": "Mathematics",
    "concepts/automatic-settings": "Automatic settings",
}

_SEGMENT = re.compile(
    r"(?P<doctest>^[ ]*>>>.*\n?(?:^[ ]*\S.*\n?)*)"
    r"|(?P<math>^(?P<indent>[ ]*)\.\. math::[ ]*(?P<line>.*)\n?"
    r"(?P<body>(?:[ ]*\n|(?P=indent)[ ]+.*\n?)*))",
    re.MULTILINE,
)
_TOKEN = re.compile(
    r"(?P<role>:math:`(?P<formula>[^`]+)`)"
    r"|(?P<code>`[^`]+`)"
    r"|(?P<page>docs/(?P<name>[\w/-]+)\.md)"
    r"|(?P<bullet>^[ ]*\*[ ])"
    r"|(?P<emphasis>(?<![\w*])\*\w(?:[^*\n]*\w)?\*(?!\w))"
    r"|(?P<special>\*|<|(?<!\w)_|_(?!\w))",
    re.MULTILINE,
)


def to_markdown(text: str, links: dict[str, str] | None = None) -> str:
    """The Markdown source of a docstring.

    Args:
        text: a docstring, without its common indentation.
        links: where a name in backticks leads, by name.
    """
    parts, end = [], 0
    for segment in _SEGMENT.finditer(text):
        parts.append(_prose(text[end : segment.start()], links or {}))
        parts.append(segment[0] if segment["doctest"] is not None else _display(segment))
        end = segment.end()
    parts.append(_prose(text[end:], links or {}))
    return "".join(parts)


def _display(directive: re.Match[str]) -> str:
    """A `.. math::` block; several lines are aligned, as the directive would do."""
    indent = directive["indent"]
    lines = [directive["line"], *directive["body"].split("\n")]
    formula = "\n".join(line.strip() for line in lines).strip()
    if r"\\" in formula:
        formula = f"\\begin{{aligned}}\n{formula}\n\\end{{aligned}}"
    lines = ["", "$$", *formula.split("\n"), "$$", "", ""]
    return "\n".join(indent + line if line else "" for line in lines)


def _prose(text: str, links: dict[str, str]) -> str:
    def replace(token: re.Match[str]) -> str:
        if token["role"]:
            return rf"\({token['formula']}\)"
        if token["code"]:
            target = links.get(token["code"].strip("`"))
            return token["code"] if target is None else f"[{token['code']}][{target}]"
        if token["page"]:
            name = token["name"]
            heading = name.rpartition("/")[2]
            return f"[{PAGES[name]}][{heading}]" if name in PAGES else token["page"]
        if token["special"]:
            return "&lt;" if token["special"] == "<" else "\\" + token["special"]
        return token[0]

    text = re.sub(r"^([ ]*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    return _TOKEN.sub(replace, text)


class Docstrings(griffe.Extension):
    """Apply `to_markdown` to every docstring of the package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visit all objects once the package is loaded."""
        public = [module for name, module in pkg.modules.items() if not name.startswith("_")]
        subpackages = [module for module in public if module.exports]
        shared: dict[str, str] = {}
        for module in [pkg, *subpackages]:
            for name in _public(module):
                if name[0].isupper():
                    shared.setdefault(name, f"{module.path}.{name}")
        for module in pkg.modules.values():
            own = {name: _path(module, name) for name in _public(module)}
            _visit(module, shared | (own if module in subpackages else {}))
        _rewrite(pkg, shared)
        overview = griffe.Module("overview", filepath=pkg.filepath)
        pkg.set_member("overview", overview)
        for page in sorted(API.glob("*.md")):
            text = griffe.Docstring(_table(pkg, page), lineno=1)
            table = griffe.Module(page.stem, filepath=pkg.filepath, docstring=text)
            overview.set_member(page.stem, table)


def _table(pkg: griffe.Module, page: Path) -> str:
    """What a page documents, a line each: its name with a link, and the head of its docstring."""
    rows = ["| name | what it is |", "|---|---|"]
    for path in re.findall(r"^::: fcco\.(?!overview)(.+)$", page.read_text(), re.MULTILINE):
        each = pkg[path]
        entries = {path.rpartition(".")[2]: (f"fcco.{path}", each)}
        if each.is_module:
            part = f"{each.name}." if "." in path else ""  # integrations have the same names
            entries = {part + name: (_path(each, name), each[name]) for name in _public(each)}
        for name, (target, found) in entries.items():
            if found.docstring is not None and (found.is_class or found.is_function):
                head = " ".join(found.docstring.value.split("\n\n")[0].split())
                head = head.replace("|", r"\|")
                rows.append(f"| [`{name}`][{target}] | {head} |")
    return "\n".join(rows)


def _source(obj: Any) -> str:
    """Where an object is defined: a link where REPO_URL is given."""
    file = f"src/{obj.relative_package_filepath.as_posix()}"
    repository = os.environ.get("REPO_URL", "").rstrip("/")
    link = f"{repository}/blob/main/{file}#L{obj.lineno}-L{obj.endlineno}"
    return f"\n\n[Source]({link})" if repository else f"\n\nSource: `{file}`, line {obj.lineno}"


def _public(module: griffe.Module) -> list[str]:
    """The names that a module offers: its `__all__`, or what it imports under their own name."""
    names = [str(name) for name in module.exports or ()]
    if names:
        return names
    return [name for name, member in module.members.items() if member.is_alias]


def _path(module: griffe.Module, name: str) -> str:
    """Where a public name is documented; a function may have the name of its own file."""
    return f"{module.path}.{name}" if name not in module.modules else f"{module.path}.{name}.{name}"


def _visit(obj: Any, links: dict[str, str]) -> None:
    _rewrite(obj, links)
    if obj.is_class:
        obj.bases = [base for base in obj.bases if not str(base).rpartition(".")[2].startswith("_")]
    for member in obj.members.values():
        if not member.is_alias:
            _visit(member, links)


def _rewrite(obj: Any, links: dict[str, str]) -> None:
    if obj.docstring is None:
        return
    own = {obj.name, *(parameter.name for parameter in getattr(obj, "parameters", ()))}
    allowed = {name: path for name, path in links.items() if name not in own}
    text = obj.docstring.value
    if obj.is_module:  # its page has a table of what it has
        text = re.sub(r"^\|.*\n?", "", text, flags=re.MULTILINE)
    text = to_markdown(text, allowed)
    entry = (obj.is_class or obj.is_function) and obj.parent.is_module
    obj.docstring.value = text + _source(obj) if entry else text
