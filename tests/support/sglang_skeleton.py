"""SGLang's seams, recorded: of each function and class that the plugin knows, the names that its tables compare.

    python -m sglang_skeleton FOLDER      # prints that of a sglang/srt; recorded in sglang_0_5_23.txt

The test environment has no SGLang (it is 4 GB), so the record stands in for it in every run; `make test-sglang` holds
the record against the wheel itself.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from pdbus.sglang import seams

RECORDED = Path(__file__).parent / "sglang_0_5_23.txt"
_FILE = "#: "


def skeleton(root: Path) -> str:
    """All modules in one text, each after a line with its path."""
    wanted: dict[str, dict[str, set[str]]] = {}  # module -> name of a function or class -> methods of that
    for seam in (*seams.HOOKS, *seams.CALLS):
        name, _, method = seam.name.partition(".")
        wanted.setdefault(seam.module, {}).setdefault(name, set()).update([method] if method else [])
    for record in seams.RECORDS:
        wanted.setdefault(record.module, {}).setdefault(record.name, set())
    return "".join(_module(root, module, names) for module, names in sorted(wanted.items()))


def write(recorded: str, root: Path) -> None:
    """The record as the files that it was made of."""
    for part in recorded.split(_FILE)[1:]:
        name, _, text = part.partition("\n")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _module(root: Path, module: str, names: dict[str, set[str]]) -> str:
    path = Path(*module.split(".")).with_suffix(".py")
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    lines = [f"{_FILE}{path}"]
    for name, methods in sorted(names.items()):
        node = defined[name]
        if isinstance(node, ast.ClassDef):
            fields = {field for record in seams.RECORDS if (record.module, record.name) == (module, name)
                      for field in record.fields} & seams.attributes(node)  # fmt: skip
            lines.append(f"class {name}:")
            lines += [f"    {field}: object" for field in sorted(fields)]
            lines += [f"    {_function(each)}" for each in node.body if getattr(each, "name", None) in methods]
            lines += [] if fields or methods else ["    ..."]
        else:
            lines.append(_function(node))
    return "\n".join(lines) + "\n"


def _function(node: ast.AST) -> str:
    return f"def {getattr(node, 'name', '')}({seams.parameters_of(node)}): ..."


if __name__ == "__main__":
    print(skeleton(Path(sys.argv[1])), end="")
