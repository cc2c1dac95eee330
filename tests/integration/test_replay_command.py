"""`pdbus replay` as a user calls it: table, JSON, files, one-line errors; and against live sim nodes."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from explored import Page

from pdbus.lab.choosers import METHODS
from pdbus.lab.metrics import estimate
from pdbus.lab.tables import COLUMNS, written

SHORT = ("--duration-s", "20", "--jobs", "1")


def replay(*arguments: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_json_is_what_the_table_is_made_of() -> None:
    done = replay(*SHORT, "--methods", "total_tokens,cache_aware", "--json", "--ranks", "4", "--seed", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trace"] == "generated-3"
    assert found["ranks"] == 4
    assert list(found["methods"]) == ["total_tokens", "cache_aware"]
    for summary in found["methods"].values():
        assert 0 < summary["ttft_p50_s"] <= summary["ttft_p99_s"]
        assert summary["ttft_mean_s"] > 0 < summary["tpot_mean_s"]
        assert 0 <= summary["cache_hit_rate"] <= 1
        assert summary["regret_mean_tokens"] >= 0
    again = replay(
        *SHORT, "--methods", "total_tokens,cache_aware", "--json", "--ranks", "4", "--seed", "3", "--jobs", "2"
    )
    assert json.loads(again.stdout) == found


def test_a_mooncake_file_all_methods_table_and_plots(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    rows = [
        {
            "timestamp": 3000 * (n // 4),
            "input_length": 900 + 512 * (n % 7),
            "output_length": 9,
            "hash_ids": [n % 3, 5 + n],
        }
        for n in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "plots"
    done = replay(str(trace), "--methods", "all", "--jobs", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in METHODS)
    for name in ("methods.png", "ttft.png", "load.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads((out / "replay.json").read_text())["requests"] == 60


def test_seeds_give_means_and_intervals_and_progress_from_the_start() -> None:
    arguments = ("--methods", "round_robin,total_tokens", "--ranks", "2", "--seeds", "3", "--seed", "7")
    done = replay("--duration-s", "20", "--jobs", "2", *arguments)
    assert done.returncode == 0, done.stderr
    assert "mean of 3 seeds ±95 % confidence interval" in done.stdout
    assert "generated-7 to generated-9" in done.stdout
    first, *others = done.stderr.splitlines()
    assert first.endswith("6 runs, 2 at once")
    assert len(others) == 6
    assert any(line.startswith("total_tokens seed 9 done; ") for line in others)
    assert "6 of 6 runs done" in others[-1]
    found = json.loads(replay("--duration-s", "20", "--jobs", "1", *arguments, "--json").stdout)
    assert found["seeds"] == [7, 8, 9]
    assert found["options"]["seeds"] == 3
    means = [run["ttft_mean_s"] for run in found["runs"] if run["method"] == "total_tokens"]
    assert found["methods"]["total_tokens"]["ttft_mean_s"] == pytest.approx(sum(means) / 3, abs=1e-5)
    assert f" {written(COLUMNS[0], estimate(means))} " in done.stdout


def test_sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = replay(*SHORT, "--methods", "follow_bootstrap_room,oracle", "--seeds", "2")
    assert max(map(len, done.stdout.splitlines())) <= 60
    assert "…" not in done.stdout
    shown = replay("--help").stdout
    assert max(map(len, shown.splitlines())) <= 60
    told = " ".join(shown.split())
    assert "tokens queued at the fullest rank over those at the mean rank" in told
    assert "beyond those at the rank that was best at that moment" in told


def test_plots_that_cannot_be_drawn_are_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "pdbus", "replay", "--duration-s", "3600", "--out", str(tmp_path / "plots")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pdbus: error: plots need matplotlib: pip install matplotlib, or leave out --out\n"
    (tmp_path / "file").touch()
    done = replay("--duration-s", "3600", "--out", str(tmp_path / "file" / "plots"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pdbus: error: cannot write plots to {tmp_path}/file/plots: Not a directory\n"


def test_markdown() -> None:
    done = replay(*SHORT, "--methods", "oracle", "--markdown", "--decode-ranks", "0")
    assert done.stdout.splitlines()[0].startswith("| method | TTFT mean s |")
    assert "| `oracle` |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.jsonl",), "cannot read the trace nowhere.jsonl: No such file"),
        (("--methods", "best"), "unknown method 'best' for replay: choose from round_robin"),
        (("--methods", ","), "--methods names no method"),
        (("--load", "-1"), "--load must not be negative"),
        (("--report-loss", "1"), "--report-loss must lie in 0..1"),
        (("--duration-s", "0"), "--duration-s must lie"),
        (("--live", "--methods", "oracle"), "--live runs what a controller can"),
        (("--concurrency", "two"), "--concurrency is a number, or some with commas between them"),
        (("--concurrency", "0"), "--concurrency must lie between 1 and 1,000,000"),
        (("--keep", "0.9", "--live"), "--keep searches a rate in virtual time"),
        (("--keep", "0.9", "--concurrency", "3"), "--keep searches a rate in virtual time"),
        (("--keep", "0"), "0 is not in the range"),
        (("--concurrency", "2", "--rate", "1"), "--rate and --concurrency exclude each other"),
        (("tests",), "has no .json file: a folder is read as WEKA's sessions"),
        (("--engine", "vllm"), "--engine vllm is for --live"),
        (("--live", "--model", "smollm2"), "--model and --engine-args are for --engine vllm"),
        (("--live", "--engine", "vllm", "--engine-args", "'--x"), "--engine-args: No closing quotation"),
        (("--seeds", "0"), "0 is not in the range"),
        (("--ranks", "many"), "'many' is not a valid integer"),
        (("--ranks", "0"), "--ranks must be at least 1 where there are no --unified-ranks"),
        (("--unified-ranks", "2", "--ranks", "2"), "--unified-ranks go with --ranks and --decode-ranks together"),
        (("--live", "--decode-ranks", "0"), "--live needs decode ranks beside prefill ranks"),
        (("--live", "--decode-cache"), "needs --decode-cache and --decode-prefills together"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = replay(*SHORT, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pdbus replay: error: ") or done.stderr.startswith("pdbus: error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("split", [("--ranks", "1", "--decode-ranks", "1"), ()], ids=["mixture", "unified"])
def test_unified_nodes_live_and_virtual_side_by_side(split: tuple[str, ...]) -> None:
    done = replay("--live", "--duration-s", "12", *split, "--unified-ranks", "2", "--load", "0.5", "--methods",
                  "cache_aware", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    live, virtual = json.loads(done.stdout)["methods"].values()
    assert live["requests"] == virtual["requests"] > 5
    assert virtual["unified_busy"] - 0.3 < live["unified_busy"] <= 1  # a slow machine makes steps longer
    assert live["unified_busy"] > 0 < live["tpot_mean_s"]
    assert (live["prefill_busy"] is None) == (virtual["prefill_busy"] is None) == (not split)


@pytest.mark.slow
def test_live_nodes_and_virtual_ones_side_by_side() -> None:
    done = replay("--live", "--duration-s", "12", "--ranks", "2", "--decode-ranks", "2", "--load", "0.7", "--methods",
                  "cache_aware", "--json", "--cache-blocks", "1000")  # fmt: skip
    assert done.returncode == 0, done.stderr
    live, virtual = json.loads(done.stdout)["methods"].values()
    assert live["cache_hit_rate"] == pytest.approx(virtual["cache_hit_rate"], abs=0.1)
    assert 0.7 < live["ttft_p50_s"] / virtual["ttft_p50_s"] < 2.5  # a machine's pause is in the mean, not in the median
    assert live["regret_mean_tokens"] is None


@pytest.mark.slow
def test_live_orders_take_turns_with_the_same_requests() -> None:
    done = replay("--live", "--duration-s", "5", "--ranks", "2", "--decode-ranks", "2", "--load", "1.2", "--methods",
                  "total_tokens", "--queue-order", "both", "--seeds", "2", "--markdown")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert told == [
        "total_tokens seed 1", "total_tokens slo seed 1", "total_tokens slo seed 2", "total_tokens seed 2",
        "total_tokens",
    ]  # fmt: skip
    assert "SLO kept by order slo: " in done.stderr
    rows = [line.split("|")[1].strip(" `") for line in done.stdout.splitlines()[2:]]
    kinds = ("", " (virtual)")
    assert rows == [f"total_tokens{order}{kind}" for order in ("", " slo") for kind in kinds]


def test_sessions_by_number_under_way_as_the_page_has_it(tmp_path: Path) -> None:
    """The page's command runs with fewer sessions."""
    out = tmp_path / "plots"
    lines = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if each.startswith("    pdbus replay --sessions")]
    for words, fewer in ((" 200 ", " 8 "), (" 16,32,64 ", " 2,3 "), (" 300 ", " 20 "), (" out", f" {out}")):
        assert words in line
        line = line.replace(words, fewer)
    done = replay(*shlex.split(line)[2:], "--ranks", "2", "--decode-ranks", "2", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "2, 3 sessions under way" in done.stdout
    assert "after 20 s)" in done.stdout
    assert (out / "throughput.png").read_bytes().startswith(b"\x89PNG\r\n")
    found = json.loads((out / "replay.json").read_text())["methods"]
    assert list(found) == ["round_robin c2", "round_robin c3", "cache_aware c2", "cache_aware c3"]
    assert found["cache_aware c3"]["requests_per_s"] > found["cache_aware c2"]["requests_per_s"]


def test_a_folder_of_sessions_gives_its_table(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in "abc":
        turns = [
            {"t": 20.0 * turn, "in": 300 + 200 * turn, "out": 9, "hash_ids": list(range(1, 5 + 3 * turn)),
             "api_time": 2.0, "think_time": 18.0 if turn else 0.0}
            for turn in range(3)
        ]  # fmt: skip
        session = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": turns}
        (folder / f"{name}.json").write_text(json.dumps(session))
    done = replay(str(folder), "--ranks", "2", "--decode-ranks", "2", "--concurrency", "2", "--jobs", "1", "--methods",
                  "round_robin,cache_aware")  # fmt: skip
    assert done.returncode == 0, done.stderr
    title = " ".join(done.stdout.split())  # it goes over two lines
    assert title.startswith("sessions, 9 requests ")
    assert "2 prefill + 2 decode ranks, 2 sessions under way" in title
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["round_robin"], ["cache_aware"])]
    assert len(rows) >= 2, done.stdout
    assert all(any(word[0].isdigit() for word in row) for row in rows), done.stdout


def test_the_highest_rate_as_the_page_has_it(tmp_path: Path) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if each.startswith("    pdbus replay --keep")]
    arguments = shlex.split(line.replace("--seeds 5", "--seeds 2"))[2:]
    done = replay(*arguments, *SHORT, "--ranks", "2", "--decode-ranks", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "each at its highest rate" in done.stdout
    found = json.loads((tmp_path / "replay.json").read_text())
    first, second = (found["methods"][method] for method in ("round_robin", "cache_aware"))
    assert first["kept_ratio"] == 1.0 <= second["kept_ratio"]
    assert first["kept_rate_per_s"] > 0 < found["half_width_95"]["cache_aware"]["kept_rate_per_s"]
    assert min(run["slo_attainment"] for run in found["runs"]) >= 0.9
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("begins", "columns"),
    [("--unified-ranks", ("unified busy",)), ("--link-s-per-token", ("fetch mean ms", "KV moved"))],
)
def test_ranks_and_transfers_as_the_page_has_them(begins: str, columns: tuple[str, ...]) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if each.startswith(f"    pdbus replay {begins}")]
    arguments = (*shlex.split(line)[2:], *SHORT, "--methods", "cache_aware", "--markdown")
    heading, _, row = replay(*arguments).stdout.splitlines()
    cells = dict(zip(heading.split("|"), row.split("|"), strict=True))
    for column in columns:
        assert float(cells[f" {column} "].strip(" %")) > 0
        assert column not in replay(*SHORT, "--methods", "oracle", "--markdown").stdout


def test_live_sessions_come_after_their_answers(tmp_path: Path) -> None:
    rows = [
        {"session_id": f"{session}", "input_length": 700, "output_length": 8, "hash_ids": [3 * session + turn]}
        | ({"delay": 50.0} if turn else {"timestamp": 100.0 * session})
        for session in range(6)
        for turn in range(3)
    ]
    trace = tmp_path / "turns.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    done = replay(str(trace), "--live", "--ranks", "1", "--decode-ranks", "1", "--concurrency", "2", "--methods",
                  "cache_aware", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    live, virtual = json.loads(done.stdout)["methods"].values()
    assert live["requests"] > 10 < virtual["requests"]
    assert live["cache_hit_rate"] == pytest.approx(virtual["cache_hit_rate"], abs=0.15)


def test_a_timeline_as_the_page_has_it(tmp_path: Path) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if "--timeline" in each and each.startswith("    pdbus replay")]
    path = tmp_path / "out.json.gz"
    done = replay(*shlex.split(line.replace("out.json.gz", str(path)))[2:], *SHORT, "--timeline-from-s", "4")
    assert done.returncode == 0, done.stderr
    found = json.loads(gzip.decompress(path.read_bytes()))
    about = found["otherData"]
    written = (
        f"wrote {path}: {about['slices']:,} slices, {about['counters']:,} counter values, {about['flows']:,} arrows"
    )
    assert written in done.stderr
    steps = [each for each in found["traceEvents"] if each.get("cat") == "step"]
    assert len(steps) > 100
    assert about["notes"][0].startswith("virtual time, cache_aware slo seed 1: generated-1, ")
    assert about["notes"][1] == "from 4 s to 14 s of the run, in virtual time"
    assert about["zero_us"] == 4_000_000


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--timeline", "{folder}/none/out.json"), "cannot write {folder}/none/out.json: No such file or directory"),
        (("--timeline", "{folder}/out.json", "--seeds", "2"), "--timeline shows one run: name one of --methods, one"),
        (("--timeline", "{folder}/out.json", "--methods", "all"), "--timeline shows one run"),
        (("--timeline", "{folder}/out.json", "--live"), "--timeline shows one run"),
        (("--timeline", "{folder}/out.json", "--keep", "0.9"), "--timeline shows one run"),
    ],
)
def test_a_timeline_that_cannot_be_is_one_line_before_the_run(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    done = replay("--methods", "oracle", *(each.format(folder=tmp_path) for each in arguments))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pdbus: error: {why.format(folder=tmp_path)}")
    assert not list(tmp_path.iterdir())


def test_a_page_as_the_page_of_the_docs_has_it(tmp_path: Path) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if "--html" in each and each.startswith("    pdbus replay")]
    path = tmp_path / "out.html"
    methods = shlex.split(line.replace("out.html", str(path)))[2:]
    plain = replay(*methods[:2], *SHORT, "--seeds", "2", "--json")
    done = replay(*methods, *SHORT, "--seeds", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout, "it changes nothing of the run"
    head = Page(path.read_text(encoding="utf-8")).data.head
    assert head["runs"][0]["name"] == "cache_aware", "the best is first"
    assert {run["name"] for run in head["runs"]} == {row[0] for row in head["rows"]} == {*methods[1].split(",")}
    assert head["title"].startswith("generated-1 to generated-2, ")
    assert head["notes"][0] == "The runs are those of seed 1; the table has means over 2 seeds."
    assert [each.name for each in tmp_path.iterdir()] == ["out.html"]


def test_a_page_shows_what_a_search_found_at_which_rates(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    done = replay(
        *SHORT, "--methods", "round_robin,cache_aware", "--keep", "0.5", "--slo-ttft-s", "5", "--html", str(path)
    )
    assert done.returncode == 0, done.stderr
    head = Page(path.read_text(encoding="utf-8")).data.head
    assert head["loads"]["x"] == "the starts in a second"
    for _, points in head["loads"]["lines"]:
        assert len(points) > 3
        assert points == sorted(points)
    assert len(head["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--html", "{folder}/none/out.html"), "cannot write {folder}/none/out.html: No such file or directory"),
        (("--html", "{folder}/out.pdf"), "--html writes a page: name a file that ends with .html, not out.pdf"),
        (("--html", "{folder}/out.html", "--live"), "--html shows runs in virtual time: leave out --live"),
        (("--html", "{folder}/out.html", "--methods", "best"), "unknown method 'best' for replay"),
        (
            ("--html", "{folder}/out.html", "--ranks", "2", "--cache-blocks", "1"),
            "--cache-blocks 1 of 512 tokens cannot",
        ),
    ],
)
def test_a_page_that_cannot_be_is_one_line_and_no_file(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    done = replay("--duration-s", "20", *(each.format(folder=tmp_path) for each in arguments))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"pdbus: error: {why.format(folder=tmp_path)}")
    assert not list(tmp_path.iterdir())


def test_a_page_without_bokeh_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "bokeh.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "pdbus", "replay", "--duration-s", "3600", "--html", str(tmp_path / "out.html")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pdbus: error: --html needs Bokeh: pip install bokeh, or leave out --html\n"
    assert not (tmp_path / "out.html").exists()
