"""The tutorial, and what README.md says to do on one machine, typed in their order; what they show comes back.

What no test types stands in the open in `UNTYPED`, with what it wants; a new block is typed, or joins it.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import ROOT, blocks, commands, pages, shell, transcript
from terminal import Terminal, pattern, unshown

from bus.runtime.ports import free_ports

HERE = "tests/integration/test_docs_typed.py"
# Pages, or lines that begin a block, and who types them as they stand.
TYPED = {
    "docs/tutorial.md": HERE,
    "docs/hosts.md": "tests/hosts/test_served.py",
    ". .venv/bin/activate": HERE,
    'pdbus generate "What is a load balancer?"': HERE,
    "from pdbus import Client": HERE,
    "def test_mine(pdbus_cluster)": "tests/integration/test_pytest_plugin.py",
    "$ PDBUS_CONTROLLER_HANG_S=7": HERE,
    "from controller import Policy": HERE,
    "pdbus replay --methods cache_aware,power_of_two,": HERE,
    "pdbus replay --methods total_tokens,quickest.py": HERE,
    "$ pdbus trace abc": HERE,
    "pdbus keys new keys prefill decode": "tests/integration/test_systemd_units.py",
    "pdbus keys add keys node prefill2": "tests/integration/test_systemd_units.py",
    "pdbus keys add keys node prefill-b": "tests/integration/test_key_rotation.py",
    "pdbus keys add keys client edge-b": "tests/integration/test_key_rotation.py",
    "# stop controller-1": "tests/integration/test_key_rotation.py",
    "# stop the broker": "tests/integration/test_key_rotation.py",
}
UNTYPED = {
    "make demo": "a checkout without an environment, which it downloads; CI is these two lines",
    "pip install -c constraints.txt": "a fresh machine; make test-dist installs the wheel and the sdist",
    "pip install '.[serve]'": "a fresh machine; the commands below it are the tutorial's",
    "pdbus calibrate": "a GPU with vLLM and a model",
    "make bench": "two idle cores for six minutes",
    "python -m controller --prefill-method cache_aware --queue-order slo": "nothing: it serves until it is stopped",
    "python -m controller --prefill-method cache_aware \\": "a SGLang server that publishes KV events",
    "pdbus plan conversation_trace": "the trace, which is not ours to hand out",
    "pdbus replay azure_code.csv": "the traces, and two idle cores for an hour",
    "pdbus replay conversation_trace.jsonl --methods all": "the trace",
    "pdbus replay --duration-s 150": "the trace, and two idle cores for ten minutes",
    "ray start --head": "machines of a Ray cluster with GPUs; make test-ray has a played one",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "a collector of OpenTelemetry; tests/integration/test_tracing_live.py plays one",
    "headers: dict[str, str]": "a program with spans of its own",
    "vLLM, Prometheus": "docs/vllm.md wants GPUs, examples/observability Prometheus",
}


@pytest.fixture
def place() -> Iterator[Path]:
    """`out`, beside the examples, as in a checkout. Sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        (Path(path) / "out").mkdir()
        (Path(path) / "examples").symlink_to(ROOT / "examples")
        yield Path(path)


def moved(text: str) -> str:
    """With ports that nobody else has."""
    base = free_ports("127.0.0.1", 6)
    return text.replace(":5550", f":{base}").replace(":5560", f":{base + 3}").replace(":8000", f":{base + 5}")


def test_the_tutorial(place: Path) -> None:
    page = "\0".join(block.text for block in blocks(ROOT / "docs" / "tutorial.md") if block.info == "console")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        for block in moved(page).split("\0"):
            for command, shown in transcript(block):
                terminal.type(command, shown)


def test_the_readme_on_one_machine_and_the_edges_page(place: Path) -> None:
    scripts = [shell(block) for block in blocks(ROOT / "README.md") if block.info == "sh"]
    (start,), (asks,) = ([each for each in scripts if words in each] for words in ("pdbus up --prefill 2", "pdbus top"))
    (curl,) = (block.text for block in blocks(ROOT / "docs" / "edge.md") if block.text.startswith("curl "))
    (up,) = (shlex.join(words) for words in commands(start) if words[0] == "pdbus")
    up, curl = moved(f"{up} --model sim --http 127.0.0.1:8000 -- --sim-timing zero\0{curl}").split("\0")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…", "Try, from another terminal: …"])
        for words in commands(asks):
            if words != ["pdbus", "top"]:  # wants a screen: test_top_live
                terminal.type(f"{shlex.join(words)} && echo it went well", ["it went well"])
        terminal.type(curl, ['…"finish_reason":"length"…'])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_the_readmes_program_and_the_trace_of_a_request(place: Path) -> None:
    (program,) = [block.text for block in blocks(ROOT / "README.md") if block.text.startswith("from pdbus import")]
    (place / "out" / "first.py").write_text(program, encoding="utf-8")
    (place / "out" / "abc.py").write_text(
        "from pdbus import Client\nwith Client() as client: client.generate('Hello', max_tokens=8, rid='abc').result\n"
    )
    (page,) = [block for block in blocks(ROOT / "docs" / "tracing.md") if block.text.startswith("$ pdbus trace")]
    ((command, shown),) = transcript(page.text)
    mine = [line for line in shown if re.search(r"asked for|received|controller-0  done", line)]
    assert len(mine) == 3, "ranks' marks come as they come"
    mine = [re.sub(r"\d+ tokens|▏", "…", line) for line in mine]
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type("pdbus up --model sim --prefill 1 --decode 1 2> up.log & up=$!", ["READY bus=…"])
        terminal.type("python first.py && echo && echo it went well", ["it went well"])
        terminal.type(f"python abc.py && {command}", [shown[0], *mine])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_the_settings_pages_file_and_session(place: Path) -> None:
    page = list(blocks(ROOT / "docs" / "configuration.md"))
    (file,) = [block.text for block in page if block.info == "toml"]
    (place / "out" / "cluster.toml").write_text(file, encoding="utf-8")
    (session,) = [block.text for block in page if block.text.startswith("$ ")]
    with Terminal(place / "out", COLUMNS="200") as terminal:
        for command, shown in transcript(session):
            terminal.type(command, shown)


def test_the_policies_pages_own_method(place: Path) -> None:
    page = list(blocks(ROOT / "docs" / "own-policy.md"))
    (method,) = [block.text for block in page if block.text.startswith("from controller import Policy")]
    (place / "quickest.py").write_text(method, encoding="utf-8")
    (first,) = [block.text for block in page if "examples/two_choices.py:TwoChoices" in block.text and shell(block)]
    (lines,) = [block.text for block in page if "quickest.py:Quickest" in block.text and shell(block)]
    replay, up = lines.splitlines()
    with Terminal(place, PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        assert "--seeds 5" in first
        terminal.type(
            first.replace("--seeds 5", "--seeds 1"), ["cache_aware …", "examples/two_choices.py:TwoChoices …"]
        )
        terminal.type(replay, ["total_tokens …", "quickest.py:Quickest …"])
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…"])
        terminal.type("pdbus generate hello && echo it went well", ["it went well"])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_what_no_test_types_is_listed_with_what_it_wants() -> None:
    """docs/api.md shows signatures, and docs/vllm.md and examples/observability are lines of their own in the list."""
    assert len(UNTYPED) <= 15
    assert not UNTYPED.keys() & TYPED.keys()
    for path in TYPED.values():
        assert (ROOT / path).exists()
    used = set()
    for page in pages():
        name = str(page.relative_to(ROOT))
        if name == "docs/api.md" or name in TYPED:
            used.add(name)
            continue
        if name in ("docs/vllm.md", "examples/observability/README.md"):
            used.add("vLLM, Prometheus")
            continue
        for block in blocks(page):
            if block.info == "inline" or not (shell(block) or block.info == "python"):
                continue
            listed = [begin for begin in (*TYPED, *UNTYPED) if block.text.startswith(begin)]
            assert listed, f"{block}: type it in a test, or list it with what it wants: {block.text[:80]}"
            used.update(listed)
    assert used == {*TYPED, *UNTYPED, "docs/api.md"}, "what is listed stands on a page"


def test_a_line_of_a_page_stands_for_lines_like_it() -> None:
    assert pattern("decode-0/0  ready  0.6s  1+0  …").search(" decode-0/0   ready  1.25s       7+0  30%   0/0 ")
    assert not pattern("decode-0/0  ready").search("decode-0/1  ready")
    assert not pattern("ended by length, attempt").search("ended by stop, attempt 1")
    assert unshown("a\nb\nc", ["a", "…", "", "c"]) == ""
    assert unshown("a\nb\nc", ["c", "a"]) == "a"
