"""The tutorial, and what README.md says to do on one machine, typed in their order; what they show comes back.

What no test types stands in the open in `UNTYPED`, with what it wants; a new block is typed, or joins it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
from collector import Collector
from docs_commands import ROOT, blocks, commands, pages, shell, transcript
from terminal import Terminal, pattern, unshown

from bus.runtime.ports import free_ports

HERE = "tests/integration/test_docs_typed.py"
# Pages, or lines that begin a block, and who types them as they stand.
TYPED = {
    "docs/tutorial.md": HERE,
    "docs/hosts.md": "tests/hosts/test_served.py",
    "docs/agents.md": "tests/real_vllm/test_coders.py",
    ". .venv/bin/activate": HERE,
    'pdbus generate "What is a load balancer?"': HERE,
    "from pdbus import Client": HERE,
    "def test_mine(pdbus_cluster)": "tests/integration/test_pytest_plugin.py",
    "$ PDBUS_CONTROLLER_HANG_S=7": HERE,
    "pkill -HUP": HERE,
    "from controller import Policy": HERE,
    "pdbus replay --methods cache_aware,power_of_two,": HERE,
    "pdbus replay --methods total_tokens,quickest.py": HERE,
    "python -m controller --prefill-method cache_aware": HERE,
    "pdbus plan conversation_trace": HERE,
    "pdbus up --model sim --decode-cache": HERE,
    "pdbus replay --sessions 200": "tests/integration/test_replay_command.py",
    "pdbus replay --unified-ranks 8": "tests/integration/test_replay_command.py",
    "pdbus record 10s": "tests/integration/test_record_command.py",
    "pdbus replay --methods cache_aware --queue-order": "tests/integration/test_replay_command.py",
    "pdbus replay --methods round_robin,total_tokens,cache_aware": "tests/integration/test_replay_command.py",
    "pdbus replay --keep 0.9": "tests/integration/test_replay_command.py",
    "pdbus replay --link-s-per-token": "tests/integration/test_replay_command.py",
    "export PDBUS_SGLANG_METHOD=cache_aware": "tests/real_sglang/test_servers_live.py",
    "pdbus serve --front vllm": "tests/real_vllm/test_front_live.py",
    "PDBUS_VLLM_CONTROLLER=tcp": "tests/real_vllm/test_front_live.py",
    "pdbus replay conversation_trace.jsonl --methods all": HERE,
    "$ pdbus trace abc": HERE,
    "$ PDBUS_CONTROLLER_EXPLAIN=1": HERE,
    "OTEL_EXPORTER_OTLP_ENDPOINT": HERE,
    "headers: dict[str, str]": HERE,
    "pdbus serve --http": HERE,
    "pdbus top --http 8080": "tests/integration/test_fleet_server.py",
    "curl http://127.0.0.1:8000/v1/chat/completions": HERE,
    "pdbus keys new keys prefill decode": "tests/integration/test_systemd_units.py",
    "cp -r examples/systemd/pdbus-*": "tests/integration/test_systemd_units.py",
    "pdbus keys add keys node prefill2": "tests/integration/test_systemd_units.py",
    "sh examples/kubernetes/keys.sh": "tests/unit/test_kubernetes_keys.py",
    "pip install dist/pdbus-": "tests/release/test_distribution.py",
    "pdbus keys add keys node prefill-b": "tests/integration/test_key_rotation.py",
    "pdbus keys add keys client edge-b": "tests/integration/test_key_rotation.py",
    "# stop controller-1": "tests/integration/test_key_rotation.py",
    "# stop the broker": "tests/integration/test_key_rotation.py",
}
# What is no command, and what it is compared with.
SHOWN = {
    "docs/api.md": "the code: make api",
    "docs/protocol.md": "tests/unit/test_protocol_document.py",
    "┌──": "nothing: a drawing",
    "submit / accepted / failed": "nothing: a drawing",
    "[cluster]": HERE,
    "[alice]": "tests/unit/test_edge_keys.py",
    "pdbus.plugin.on": "tests/unit/test_sglang_document.py",
}
UNTYPED_MAX = 15
ALONE = "--jobs 1"  # in this process: test_replay_command has some side by side
SHORT = f"--duration-s 15 {ALONE}"  # of trace: no test reads these figures
UNTYPED = {
    "make demo": "a checkout without an environment, which it downloads; CI is these two lines",
    "pip install -c constraints.txt": "a fresh machine; make test-dist installs the wheel and the sdist",
    "pdbus calibrate": "a GPU with vLLM and a model",
    "make bench": "two idle cores for six minutes",
    "pdbus replay azure_code.csv": "the traces, which are not ours to hand out, and two idle cores for an hour",
    "pdbus replay --duration-s 150": "two idle cores for ten minutes; one of its two blocks the trace, too",
    "ray start --head": "machines of a Ray cluster with GPUs; make test-ray has a played one",
    "RAY_JOB_STOP_WAIT_TIME_S=90": "a Ray cluster; make test-ray has a played one",
    "docker build": "docker; make test-dist runs the Containerfile line by line",
    "guidellm run": "guidellm and a tokenizer",
    "pip install vllm nixl": "GPUs with vLLM (two blocks)",
    "python -m controller --with-broker": "three machines, two of them with GPUs and vLLM",
    "pdbus up --model sim --metrics-port 9100": "Prometheus; make test-metrics runs it with this configuration",
}


SPANS = """
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pdbus import Client
with Client() as client:
    with use_span(NonRecordingSpan(SpanContext(7, 8, False, TraceFlags(1)))):
{snippet}.result
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """`out`, beside the examples, as in a checkout. Sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        (Path(path) / "out").mkdir()
        (Path(path) / "examples").symlink_to(ROOT / "examples")
        yield Path(path)


def one(page: str, begins: str) -> str:
    """The block of a page that begins so."""
    (text,) = [block.text for block in blocks(ROOT / page) if block.info != "inline" and block.text.startswith(begins)]
    return text


def moved(text: str) -> str:
    """With ports that nobody else has."""
    base = free_ports("127.0.0.1", 6)
    return text.replace(":5550", f":{base}").replace(":5560", f":{base + 3}").replace(":8000", f":{base + 5}")


@pytest.mark.slow
def test_the_tutorial(place: Path) -> None:
    page = "\0".join(block.text for block in blocks(ROOT / "docs" / "tutorial.md") if block.info == "console")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        for block in moved(page).split("\0"):
            for command, shown in transcript(block):
                terminal.type(command, shown)


def test_the_readme_on_one_machine(place: Path) -> None:
    scripts = [shell(block) for block in blocks(ROOT / "README.md") if block.info == "sh"]
    (start,), (asks,) = ([each for each in scripts if words in each] for words in ("pdbus up --prefill 2", "pdbus top"))
    (up,) = (shlex.join(words) for words in commands(start) if words[0] == "pdbus")
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type(f"{up} --model sim -- --sim-timing zero 2> up.log & up=$!", ["READY bus=…", "Try, from …"])
        for words in commands(asks):
            if words != ["pdbus", "top"]:  # wants a screen: test_top_live
                terminal.type(f"{shlex.join(words)} && echo it went well", ["it went well"])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_the_edges_page_and_a_collector_of_spans(place: Path) -> None:
    """One cluster for both: its `up` has an edge, and says where to send spans."""
    serve, ups_edge = (shlex.join(words) for words in commands(one("docs/edge.md", "pdbus serve --http")))
    up, curl = one("docs/tracing.md", "OTEL_EXPORTER"), one("docs/edge.md", "curl http://127.0.0.1:8000/v1/chat")
    assert ups_edge == "pdbus up --http 8000"
    assert up.endswith("pdbus up --model sim --http 8000")
    first, second = free_ports("127.0.0.1", 1), free_ports("127.0.0.1", 1)
    headers = one("docs/tracing.md", "headers: dict[str, str]")
    (place / "out" / "spans.py").write_text(SPANS.format(snippet=indent(headers, " " * 8)), encoding="utf-8")
    collector = Collector()
    try:
        up = up.replace("http://127.0.0.1:4318", collector.url).replace("8000", str(first))
        with Terminal(
            place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200", OTEL_BSP_SCHEDULE_DELAY="50",
            PDBUS_NODE_SIM_TIMING="zero",
        ) as terminal:  # fmt: skip
            terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…"])
            terminal.type(f"{serve.replace('8000', str(second))} 2> edge.log & edge=$!", ["READY endpoint=…"])
            for port in (first, second):
                terminal.type(curl.replace("8000", str(port)), ['…"finish_reason":"length"…'])
            terminal.type("python spans.py && echo it went well", ["it went well"])
            terminal.type("kill $edge; wait $edge; kill $up; wait $up; echo $?", ["130"])
    finally:
        collector.close()
    assert {"POST /v1/chat/completions", "pdbus request", "pdbus decode"} <= {name for _, name in collector.spans}
    assert (f"{7:032x}", "pdbus request") in collector.spans, "the program's trace goes on"


def test_the_readmes_program_and_the_trace_of_a_request(place: Path) -> None:
    (program,) = [block.text for block in blocks(ROOT / "README.md") if block.text.startswith("from pdbus import")]
    (place / "out" / "first.py").write_text(program, encoding="utf-8")
    (place / "out" / "abc.py").write_text(
        "from pdbus import Client\nwith Client() as client: client.generate('Hello', max_tokens=8, rid='abc').result\n"
    )
    (page,) = [block for block in blocks(ROOT / "docs" / "tracing.md") if block.text.startswith("$ pdbus trace")]
    (reasons,) = [
        block for block in blocks(ROOT / "docs" / "tracing.md") if block.text.startswith("$ PDBUS_CONTROLLER")
    ]
    (up, _), (why, (_, *said)) = transcript(reasons.text)
    said = [re.sub(r" (candidates|besides).*", " …", re.sub(r"[\d,]+ tokens|in \w+ at", "…", line)) for line in said]
    ((command, shown),) = transcript(page.text)
    mine = [line for line in shown if re.search(r"asked for|received|controller-0  done", line)]
    assert len(mine) == 3, "ranks' marks come as they come"
    mine = [re.sub(r"\d+ tokens|▏", "…", line) for line in mine]
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…"])
        terminal.type("python first.py && echo && echo it went well", ["it went well"])
        terminal.type(f"python abc.py && {command}", [shown[0], *mine])
        terminal.type(why, [said[0], said[1], said[3], said[4]])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_the_settings_pages_file_and_session(place: Path) -> None:
    page = list(blocks(ROOT / "docs" / "configuration.md"))
    (file,) = [block.text for block in page if block.info == "toml"]
    (place / "out" / "cluster.toml").write_text(file, encoding="utf-8")
    (session,) = [block.text for block in page if block.text.startswith("$ ")]
    with Terminal(place / "out", COLUMNS="200") as terminal:
        for command, shown in transcript(session):
            terminal.type(command, shown)


def test_the_settings_pages_signal_reaches_a_controller(place: Path) -> None:
    """`pkill` is played: it would reach the controllers of all tests."""
    (place / "pkill").write_text('#!/bin/sh\n[ "$1" = -HUP ] && shift && exec pgrep "$@"\n', encoding="utf-8")
    (place / "pkill").chmod(0o755)
    path = f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (signal,) = (shlex.join(words) for words in commands(one("docs/configuration.md", "pkill -HUP")))
    with Terminal(place / "out", PDBUS_DIR=str(place / "s"), PATH=path, COLUMNS="200") as terminal:
        terminal.type("python -P -m controller --with-broker 2> controller.log & mine=$!", ["READY part=controller …"])
        terminal.type(f"{signal} > found; grep -cx $mine found", ["1"])
        terminal.type("kill $mine; wait $mine; echo $?", ["0"])


def test_the_policies_pages_controllers_and_replays_of_a_trace(place: Path) -> None:
    """The trace is not ours to hand out: twelve requests in its format stand for it."""
    rows = (
        {"timestamp": 250 * n, "input_length": 1024 + n, "output_length": 20, "hash_ids": [n % 5, 9, 100 + n]}
        for n in range(12)
    )
    (place / "conversation_trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    page = list(blocks(ROOT / "docs" / "policies.md"))
    controllers = [block.text for block in page if block.text.startswith("python -m controller --prefill-method")]
    with Terminal(place, PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type("python -m bus 2> bus.log &", ["READY part=broker …"])
        for each in controllers:
            terminal.type(f"{each} 2> controller.log & mine=$!", ["READY part=controller …"])
            terminal.type("kill $mine; wait $mine; echo $?", ["0"])
        plan = one("docs/policies.md", "pdbus plan conversation_trace")
        terminal.type(f"{plan} {ALONE}", ["…keeps … of the requests. To run it:"])
        replay = one("docs/notes/policies.md", "pdbus replay conversation_trace.jsonl --methods all")
        assert "--seeds 5" in replay
        quick = replay.replace("--seeds 5", f"--seeds 1 {ALONE}")
        terminal.type(quick, ["…cache_aware…", "wrote plots/methods.png…"])


def test_the_policies_pages_own_method(place: Path) -> None:
    page = list(blocks(ROOT / "docs" / "own-policy.md"))
    (method,) = [block.text for block in page if block.text.startswith("from controller import Policy")]
    (place / "quickest.py").write_text(method, encoding="utf-8")
    (first,) = [block.text for block in page if "examples/two_choices.py:TwoChoices" in block.text and shell(block)]
    (lines,) = [block.text for block in page if "quickest.py:Quickest" in block.text and shell(block)]
    replay, up = lines.splitlines()
    with Terminal(place, PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        assert "--seeds 5" in first
        quick = first.replace("--seeds 5", f"--seeds 1 {SHORT}")
        terminal.type(quick, ["cache_aware …", "examples/two_choices.py:TwoChoices …"])
        terminal.type(f"{replay} {SHORT}", ["total_tokens …", "quickest.py:Quickest …"])
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…"])
        terminal.type("pdbus generate hello && echo it went well", ["it went well"])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_the_policies_pages_decode_caches(place: Path) -> None:
    up = one("docs/policies.md", "pdbus up --model sim --decode-cache")
    ids = " ".join(str(3 + n) for n in range(64))
    with Terminal(place, PDBUS_DIR=str(place / "s"), COLUMNS="200") as terminal:
        terminal.type(f"{up} 2> up.log & up=$!", ["READY bus=…"])
        for done in ("1 done; trips: whole 1", "2 done; trips: at_decode 1, whole 1"):
            terminal.type(f"pdbus generate --tokens --max-tokens 2 '{ids}' && echo it went well", ["it went well"])
            terminal.type("pdbus status", [f"requests: 0 live, 0 waiting, {done}; to the first token …"])
        terminal.type("kill $up; wait $up; echo $?", ["130"])


def test_each_block_is_typed_or_listed_with_what_it_wants() -> None:
    """Commands in running text are parsed by tests/unit/test_docs_parse.py; Kubernetes' manifests have test-k8s."""
    known = {**TYPED, **SHOWN, **UNTYPED}
    assert len(known) == len(TYPED) + len(SHOWN) + len(UNTYPED)
    used, untyped = set(), 0
    for page in pages():
        for block in blocks(page):
            if block.info == "inline":
                continue
            listed = [begin for begin in known if block.page == begin or block.text.lstrip().startswith(begin)]
            assert listed, f"{block}: type it in a test, or list it with what it wants: {block.text[:80]}"
            used.update(listed)
            untyped += any(begin in UNTYPED for begin in listed)
            typed_here = [begin for begin in listed if known[begin].endswith(".py")]
            assert all((ROOT / known[begin]).exists() for begin in typed_here)
    assert used == set(known), "what is listed stands on a page"
    assert untyped <= UNTYPED_MAX


def test_a_line_of_a_page_stands_for_lines_like_it() -> None:
    assert pattern("decode-0/0  ready  0.6s  1+0  …").search(" decode-0/0   ready  1.25s       7+0  30%   0/0 ")
    assert not pattern("decode-0/0  ready").search("decode-0/1  ready")
    assert pattern("decode-0/0  lost  0/0  2").search("decode-0/0  lost  1/3  2"), "killed before it acknowledged"
    assert not pattern("ended by length, attempt").search("ended by stop, attempt 1")
    assert unshown("a\nb\nc", ["a", "…", "", "c"]) == ""
    assert unshown("a\nb\nc", ["c", "a"]) == "a"
