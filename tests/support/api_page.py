"""docs/api.md, built from the docstrings and signatures of what `__all__` names (`make api`).

`api_outline.md` puts every public name in its place: a line `@ package Name ...` stands for their descriptions. Sources
are read (griffe), not imported, so that annotations and comments stand as they are written.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from griffe import Alias, Attribute, Class, Function, GriffeLoader, ModulesCollection, Object

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
OUTLINE = Path(__file__).with_name("api_outline.md").read_text(encoding="utf-8")
LINE = re.compile(r"^@ (\S+) (.+)$", re.M)
PACKAGES = (
    "bus", "controller", "controller.policies", "nodes", "nodes.link",
    "pdbus", "pdbus.client", "pdbus.lab", "pdbus.launcher",
)  # fmt: skip
RECORDS = {"TypedDict", "Message", "Struct", "NamedTuple"}
PARTS_OWN = {f"bus.runtime.service.Service.{name}" for name in ("open", "close", "leave")}  # not for a part's user


class Name:
    """A public name: what it is, and what is said of it."""

    def __init__(self, path: str, found: Object) -> None:
        self.path, self.found = path, found

    @cached_property
    def members(self) -> list[tuple[str, Object]]:
        """Public functions, properties, and attributes with a docstring; inherited ones too."""
        if not isinstance(self.found, Class):
            return []
        every = ((name, target(member)) for name, member in self.found.all_members.items() if not name.startswith("_"))
        shown = (
            (n, m) for n, m in every if isinstance(m, Function) or is_property(m) or (m.docstring and m.is_attribute)
        )
        return [(name, member) for name, member in shown if member.path not in PARTS_OWN]

    @cached_property
    def fields(self) -> list[Object]:
        """Of a record or an enumeration, in order."""
        cls = self.found
        if not isinstance(cls, Class):
            return []
        bases = {str(base).rpartition(".")[2] for base in cls.bases}
        if "IntEnum" in bases:
            return [member for member in cls.members.values() if isinstance(member, Attribute)]
        if "dataclass" not in cls.labels and not RECORDS & bases:
            return []
        every = (target(member) for name, member in cls.all_members.items() if not name.startswith("_"))
        return [m for m in every if isinstance(m, Attribute) and m.annotation and not is_property(m)]

    def declaration(self) -> str:
        """In code; fields as the source has them, with their comments."""
        if isinstance(self.found, Function):
            return signature(self.found, width=100)
        if self.fields:
            return "\n    ".join([f"class {self.found.name}:", *(inspect.cleandoc(f.source) for f in self.fields)])
        made = self.found.all_members.get("__init__") if isinstance(self.found, Class) else None
        if made is None:
            return f"class {self.found.name}" if isinstance(self.found, Class) else self.found.name
        return "class " + signature(target(made), self.found.name, width=100).removesuffix(" -> None")

    def entry(self) -> str:
        lines = [f"### `{self.path}`", "", "```python", self.declaration(), "```", "", doc(self.found), ""]
        for name, member in self.members:
            head = signature(member) if isinstance(member, Function) else f"{name}: {member.annotation}"
            lines += [f"- `{head}`", "", textwrap.indent(doc(member), "  "), ""]
        return "\n".join(lines)


def target(found: Object | Alias) -> Object:
    return found.final_target if isinstance(found, Alias) else found


def is_property(found: Object) -> bool:
    return "property" in found.labels


def doc(found: Object) -> str:
    """Its docstring; arguments as a list."""
    text = inspect.cleandoc(found.docstring.value) if found.docstring else ""
    head, args, rest = text.partition("\nArgs:\n")
    if not args:
        return text
    arguments, _, tail = rest.partition("\n\n")
    listed = re.sub(r"^([\w, ]+):", r"- `\1`:", textwrap.dedent(arguments), flags=re.M)
    return f"{head}\n{re.sub(r'^    ', '  ', listed, flags=re.M)}\n\n{tail}".strip()


def signature(function: Object, name: str = "", width: int = 10_000) -> str:
    """As one calls it, without `self`; an argument a line where it is wider than that."""
    assert isinstance(function, Function)
    text = re.sub(r"\((self|cls)(, )?", "(", function.signature(name=name or function.name), count=1)
    text = f"async {text}" if "async" in function.labels else text
    if len(text) <= width:
        return text
    head, _, rest = text.partition("(")
    arguments, _, tail = rest.rpartition(")")
    ends = [i for i, char in enumerate(arguments) if char == "," and not open_brackets(arguments[:i])]
    parts = [arguments[i + 1 : j].strip() for i, j in pairwise([-1, *ends, len(arguments)])]
    return "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){tail}"])


def open_brackets(text: str) -> int:
    return sum(text.count(char) for char in "([{") - sum(text.count(char) for char in ")]}")


@cache
def modules() -> ModulesCollection:
    """All of ours, which takes seconds to read."""
    loader = GriffeLoader(search_paths=[ROOT])
    for package in sorted({package.partition(".")[0] for package in PACKAGES}):
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def public_names() -> dict[str, Name]:
    """By path, as `OUTLINE` says it. LookupError when it lacks a public name, has one twice, or one that is not
    public."""

    def find(path: str) -> Object:
        found = modules()[path]
        return target(found[found.name] if found.is_module else found)  # a function may have its module's name

    placed = [f"{package}.{name}" for package, names in LINE.findall(OUTLINE) for name in names.split()]
    homes = [find(path).path for path in placed]
    public = {find(f"{package}.{name}").path for package in PACKAGES for name in modules()[package].exports or ()}
    if wrong := set(homes) ^ public | {home for home in homes if homes.count(home) > 1}:
        raise LookupError(f"not once in tests/support/api_outline.md: {', '.join(sorted(wrong))}")
    return {path: Name(path, find(path)) for path in placed}


def page(names: dict[str, Name]) -> str:
    def entries(line: re.Match[str]) -> str:
        return "\n".join(names[f"{line[1]}.{name}"].entry() for name in line[2].split())

    return LINE.sub(entries, OUTLINE)


def unsaid(names: dict[str, Name]) -> Iterator[str]:
    """What has no docstring; fields that neither a comment nor the docstring of their record explains."""
    for path, name in names.items():
        if not doc(name.found):
            yield path
        yield from (f"{path}.{member}" for member, found in name.members if not doc(found))
        for field in name.fields:
            if "#" not in field.source and not re.search(rf"\b{field.name}\b", doc(name.found)):
                yield f"{path}.{field.name}"


if __name__ == "__main__":
    PAGE.write_text(page(public_names()), encoding="utf-8")
