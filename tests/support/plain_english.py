"""Check that the code and the pages are in plain English: `make lint` runs this.

Someone who reads English as a second language understands each sentence at once. Three rules of that can be checked:

1. A docstring is a sentence: it begins with a verb in the imperative ("Return the ...") or with its subject ("The
   rank's load is ..."). A class's or module's may also be a noun phrase that says what the thing is. None begins with
   a word of NO_BEGINNING, because then it can be understood only after the signature.
2. No text holds a word or phrase of NO_PHRASES. `who` stands only after a person (or in quotes): a machine is *it*.
3. No class, function, parameter or attribute has a word of NO_NAMES in its name: functions that send are called `send`,
   that log `log`, that enqueue `enqueue`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("bus", "nodes", "controller", "pdbus", "benchmarks", "docs", "README.md")

NO_BEGINNING = {
    "as", "by", "for", "from", "how", "its", "not", "nobody", "of", "so", "somebody", "those", "to", "until",
    "what", "where", "whether", "which", "who", "whoever", "whose", "why",
}  # fmt: skip
NO_PHRASES = (
    "anew", "for ever", "likewise", "makes no sense", "make no sense", "nobody", "nobody's", "somebody", "somebody's",
    "whoever", "whomever", "seldom", "hears of", "told of",
)  # fmt: skip
NO_NAMES = {
    "hear", "heard", "said", "say", "says", "tell", "tells", "told",
}  # fmt: skip
PERSONS = {
    "anyone", "author", "authors", "child", "everyone", "maintainer", "operator", "operators", "people", "person",
    "reader", "readers", "someone", "those", "user", "users",
}  # fmt: skip

_phrases = re.compile(r"\b(" + "|".join(re.escape(phrase) for phrase in NO_PHRASES) + r")\b", re.IGNORECASE)
_who = re.compile(r"(\w*)\W{0,3}(?<!— )(?<![`'\"])\bwho\b(?!-)", re.IGNORECASE)

Violation = tuple[int, str, str]  # line, rule, words
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def violations(source: str) -> list[Violation]:
    """Return the violations in the source text of a Python module, by line."""
    tree = ast.parse(source)
    found = [*_beginnings(tree), *_names(tree)]
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            found += in_text(token.string, token.start[0])
    return sorted(found)


def in_text(text: str, first_line: int = 1) -> list[Violation]:
    """Return the phrases in a text that no text may hold."""
    found = []
    for match in _phrases.finditer(text):
        found.append((first_line + text.count("\n", 0, match.start()), "phrase", match[1].lower()))
    for match in _who.finditer(text):
        if match[1].lower() not in PERSONS:
            found.append((first_line + text.count("\n", 0, match.end()), "who", match[0].strip()))
    return found


def _beginnings(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            first = re.match(r"[A-Za-z]*", docstring)
            if first and first[0].lower() in NO_BEGINNING:
                yield node.body[0].lineno, "beginning", first[0]


def _names(tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
            ):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        if any(word.lower() in NO_NAMES for word in words):
            yield node.lineno, "name", name


def in_file(path: Path) -> list[Violation]:
    text = path.read_text()
    return violations(text) if path.suffix == ".py" else in_text(text)


def files(root: Path = ROOT) -> list[str]:
    """Return the files that are checked, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z", *CHECKED], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name.endswith((".py", ".md")) and (root / name).is_file()]


def main(arguments: list[str]) -> int:
    """Print the violations of the files that must be clean (or of those given); with --count, the counts by folder."""
    if arguments[:1] == ["--count"]:
        counts = Counter((name.split("/")[0], rule) for name in files() for _, rule, _ in in_file(ROOT / name))
        for (folder, rule), count in sorted(counts.items()):
            print(f"{folder:12}{rule:12}{count:5}")
        return 0
    bad = 0
    for name in arguments or files():
        for line, rule, words in in_file(ROOT / name):
            print(f"{name}:{line}: {rule}: {words}")
            bad += 1
    if bad:
        print(
            f"{bad} places that are not in plain English: tests/support/plain_english.py has the rules", file=sys.stderr
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
