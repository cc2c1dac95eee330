"""Every command in README.md and docs/ is one that its program takes; a new page is found by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_commands import ROOT, Block, blocks, commands, complaints, pages, shell, transcript


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_is_one(page: Path) -> None:
    assert not [complaint for block in blocks(page) for complaint in complaints(block)]


@pytest.mark.parametrize(
    "path", [*pages(), ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*.py"))], ids=lambda path: path.name
)
def test_nothing_is_installed_by_a_name_that_no_index_has(path: Path) -> None:
    """Whoever registers it there would have their code run by whoever follows the page."""
    assert not re.findall(r"pip3? install[^\n]*[ `'\"]pdbus(?![-\w])", path.read_text(encoding="utf-8"))


def test_the_pages_have_commands() -> None:
    with_some = {block.page for page in pages() for block in blocks(page) if shell(block)}
    assert {"README.md", "docs/tutorial.md", "docs/operations.md", "examples/observability/README.md"} <= with_some


@pytest.mark.parametrize(
    ("text", "info", "why"),
    [
        ("pdbus up --prefil 2", "", "No such option"),
        ("pdbus statsu --json", "sh", "no subcommand statsu"),
        ("pdbus keys ad keys client alice", "", "no subcommand ad"),
        ("pdbus generate", "sh", "text is missing"),
        ("pdbus up --prefill two", "", "is not a valid int"),
        ("pdbus up --model sim -- --sim-bas 1", "", "No such option"),
        ("A=1 python -m controller --lease 3", "", "No such option"),
        ("python -m nodes.prefil", "sh", "no such module"),
        ("python examples/none.py", "", "no such file"),
        ("make demos", "inline", "Makefile has no demos"),
        ("make soak HOURS=1", "", "Makefile has no HOURS"),
        ("pdbsu top", "sh", "is it pdbus?"),
        ("kubectl -n pdbus exec controller-0 -- pdbus statsu", "sh", "no subcommand statsu"),
        ("nice -n 5 timeout 9 pdbus status --jsn", "sh", "No such option"),
        ("$ pdbus nothing\nsaid", "", "no subcommand nothing"),
        ("pdbus status &&", "sh", "syntax error"),
        ("for n in 1 2; do pdbus status --jsn; done", "bash", "No such option"),
        ("if true; then\n  kill -9 $broker | pdbus drian x\nfi", "sh", "no subcommand drian"),
    ],
)
def test_what_no_program_takes_is_found(text: str, info: str, why: str) -> None:
    found = list(complaints(Block("page.md", 7, info, text)))
    assert (len(found), found[0].startswith("page.md:7: ") if found else None) == ((1, True) if why else (0, None))
    assert all(why in complaint for complaint in found)


def test_text_that_is_no_command_is_none() -> None:
    for text, info in (
        ("pdbus", "inline"),
        ("client -> broker", ""),
        ("pdbus.Client", "inline"),
        ("[cluster]", "toml"),
    ):
        assert shell(Block("page.md", 1, info, text)) == ""


def test_blocks_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs_commands.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "Try `pdbus\ntop`:\n\n- so:\n\n  ```sh\n  pdbus status\n  ```\n\nor\n\n    make demo\n", encoding="utf-8"
    )
    assert [
        (block.line, block.info, shell(block).strip()) for block in sorted(blocks(page), key=lambda block: block.line)
    ] == [
        (1, "inline", "pdbus top"),
        (7, "sh", "pdbus status"),
        (12, "", "make demo"),
    ]


def test_a_script_comes_apart_into_its_commands() -> None:
    script = """A=1 pdbus status \\
      --json 2> log | jq .  # what
    for n in 1 2; do
      kill "$n"; done
    pdbus up & up=$!
    cat <<END > file
    not a command
    END
    """.replace("    END", "END")
    assert list(commands(script)) == [
        ["pdbus", "status", "--json"], ["jq", "."], ["kill", "$n"], ["pdbus", "up"], ["cat"],
    ]  # fmt: skip


def test_a_session_comes_apart_into_commands_and_what_they_say() -> None:
    session = "$ cat <<END\n> one\n> END\none\n\n$ pdbus status \\\n    --json\n{}\n$ true"
    assert transcript(session) == [
        ("cat <<END\none\nEND", ["one", ""]),
        ("pdbus status \\\n    --json", ["{}"]),
        ("true", []),
    ]
