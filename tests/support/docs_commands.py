"""The commands in README.md and docs/, and whether the programs they name would take them.

A page is found by itself. In a block of `sh` every line is a command, in one of `console`, or with a `$ `, those lines;
a block without a language is shell when a line begins with a program of ours. So is, in running text, what does.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from bus.__main__ import main as broker
from controller.__main__ import main as controller
from nodes.main import command as node
from pdbus.cli import pdbus

ROOT = Path(__file__).parents[2]
PARTS = {"bus": broker, "controller": controller, "pdbus": pdbus}
PARTS |= {f"nodes.{role}": node(role) for role in ("prefill", "decode", "unified")}
OURS = ("pdbus", "python", "make")
NAMES = ("pdbus request", "pdbus prefill", "pdbus decode", "pdbus unified")  # spans of traces, in running text
AROUND = ("env", "exec", "nice", "nohup", "sudo", "time", "timeout", "watch")  # what may stand before a command
_KEYWORD = re.compile(r"case|do|done|elif|else|esac|fi|for|function|if|in|then|until|while|[{}]")
_ASSIGNMENT = re.compile(r"\w+=.*", re.S)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|.*(\.\.\.|…|<|\$|\[).*")
_PLAIN_TYPES = (click.Choice, click.types.IntParamType, click.types.FloatParamType, click.types.BoolParamType)


@dataclass(frozen=True)
class Block:
    """A block of code, or a span of running text (`info` is "inline")."""

    page: str
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """What is fenced, indented by four, or in backticks."""
    name, fence, info, begun, held = str(page.relative_to(ROOT)), "", "", 0, list[str]()
    prose: list[tuple[int, str]] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.match(r"\s*(```+)\s*(\w*)", line)
        if fence:
            if mark and mark[1] == fence:
                yield Block(name, begun + 1, info, "\n".join(held))
                fence = ""
            else:
                held.append(line)
        elif mark:
            fence, info, begun, held = mark[1], mark[2], number, []
            prose.append((number, ""))
        else:
            prose.append((number, line))
    assert not fence, f"{name}:{begun}: this block does not end"
    blank = True  # the line before; where there is none, an indented one goes on with its paragraph
    for indented, group in groupby(prose, lambda each: each[1].startswith("    ")):
        lines = list(group)
        if indented and blank:
            yield Block(name, lines[0][0], "", "\n".join(text[4:] for _, text in lines))
            continue
        blank = not lines[-1][1].strip()
        text, first = "\n".join(text for _, text in lines), lines[0][0]
        for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
            yield Block(name, first + text.count("\n", 0, span.start()), "inline", " ".join(span[1].split()))


def shell(block: Block) -> str:
    """The block's commands as a script; empty where it has none."""
    lines = block.text.splitlines()
    if block.info == "inline":
        return block.text if _program(block.text) in OURS and " " in block.text and block.text not in NAMES else ""
    if block.info == "console" or any(line.startswith("$ ") for line in lines):
        return "\n".join(command for command, _ in transcript(block.text))
    if block.info in ("sh", "bash", "shell"):
        return block.text
    return block.text if not block.info and any(_program(line) in OURS for line in lines) else ""


def _program(line: str) -> str:
    return next((word for word in line.split() if not _ASSIGNMENT.fullmatch(word)), "")


def transcript(text: str) -> list[tuple[str, list[str]]]:
    """Of a session at a terminal, each command (`$ `, continued with `> ` or after a backslash) and what it says."""
    said: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            said.append((line[2:], []))
        elif said and not said[-1][1] and (line.startswith("> ") or said[-1][0].endswith("\\")):
            said[-1] = (f"{said[-1][0]}\n{line.removeprefix('> ')}", [])
        elif said:
            said[-1][1].append(line)
    return said


def commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command of a script. ValueError where quotes don't close."""
    script = re.sub(r"<<-?\s*'?\"?(\w+)'?\"?(.*?)\n.*?^\s*\1$", r"\2", script, flags=re.S | re.M)  # here-documents
    script = re.sub(r"(^|\s)#.*", "", re.sub(r"\\\n", " ", script), flags=re.M)
    script = re.sub(r"(?<=\s)[012](?=[<>])", "", script)
    lexer = shlex.shlex(script.replace("\n", " ; "), posix=True, punctuation_chars="();&|<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    into = False  # the word after a redirection
    for word in [*lexer, ";"]:
        if re.fullmatch(r"[<>]+&?|&>+", word):
            into = True
        elif re.fullmatch(r"[();&|]+", word):
            while words and (_KEYWORD.fullmatch(words[0]) or _ASSIGNMENT.fullmatch(words[0])):
                words = [] if words[0] in ("for", "case", "in", "function") else words[1:]
            if words:
                yield words
            words, into = [], False
        elif into:
            into = False
        else:
            words.append(word)


def complaints(block: Block) -> Iterator[str]:
    """What is wrong with a block's commands."""
    script = shell(block)
    if not script:
        return
    inline = block.info == "inline"
    if not inline:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        if checked.returncode:
            yield f"{block}: {' '.join(checked.stderr.split())}"
            return
    for words in commands(script):
        why = _complaint([word for word in words if word not in ("...", "…")], whole=not inline and "..." not in words)
        if why:
            yield f"{block}: {shlex.join(words)}: {why}"


def _complaint(words: Sequence[str], *, whole: bool) -> str:
    inner = next(
        (at for at, word in enumerate(words) if word in OURS and (words[at - 1] == "--" or words[0] in AROUND)), 0
    )
    program, *arguments = words[inner:]
    program = program.removeprefix(".venv/bin/")
    if program in ("python", "python3"):
        return _python([word for word in arguments if word != "-P"], whole)
    if program == "pdbus":
        return _parsed(pdbus, arguments, whole)
    if program == "make":
        return next(filter(None, map(_made, arguments)), "")
    meant = get_close_matches(program, OURS, cutoff=0.75)
    return f"is it {meant[0]}?" if meant else ""


def _python(arguments: Sequence[str], whole: bool) -> str:
    match arguments:
        case ["-m", module, *rest] if command := PARTS.get(re.sub(r"\{(\w+),.*\}", r"\1", module)):
            return _parsed(command, rest, whole)
        case ["-m", module, *_]:
            return "" if _PLACEHOLDER.fullmatch(module) or find_spec(module) else "no such module"
        case [script, *_] if script.endswith(".py") and "/" in script:
            return "" if (ROOT / script.removeprefix("../")).exists() else "no such file"
    return ""


def _parsed(command: click.Command, words: Sequence[str], whole: bool) -> str:
    """By the command's own parser: every option, and values of a plain type."""
    context = click.Context(command)
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
        if isinstance(command, click.Group) and rest:
            found = command.get_command(context, rest[0])
            return _parsed(found, rest[1:], whole) if found is not None else f"no subcommand {rest[0]}"
        for param in command.params:
            value = values.get(param.name)
            kind: click.ParamType[Any] = param.type
            if isinstance(value, str) and isinstance(param.type, _PLAIN_TYPES) and not _PLACEHOLDER.fullmatch(value):
                kind.convert(value, param, context)
            if whole and param.required and isinstance(param, click.Argument) and not isinstance(value, str | tuple):
                return f"{param.name} is missing"
    except click.BadOptionUsage as error:
        return error.format_message() if whole else ""  # `generate -n`
    except click.ClickException as error:
        return error.format_message()
    if command.name == "up" and values.get("engine") != "vllm" and "--" in words:
        return _parsed(PARTS["nodes.decode"], words[words.index("--") + 1 :], whole=False)
    return ""


@cache
def _makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def _made(word: str) -> str:
    name, assigned, _ = word.partition("=")
    pattern = rf"\$\(?{re.escape(name)}\b|^{re.escape(name)} \?=" if assigned else rf"^{re.escape(name)}:"
    return "" if re.search(pattern, _makefile(), re.M) else f"Makefile has no {name}"
