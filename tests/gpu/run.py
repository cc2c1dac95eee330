"""What to run first where vLLM has a GPU: the rows of docs/notes/vllm.md, each with a verdict, and a report to send in.

python tests/gpu/run.py --model DIR [--moe DIR] [--hybrid DIR] [--full]     # with a Python that has vLLM: make test-gpu

Nothing is downloaded. Without a GPU the rows that a CPU can decide run with tiny random models.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "real_vllm"), str(HERE.parents[1])]

from gpu_checks import Check  # noqa: E402
from gpu_report import FAILED, IN_PART, PASSED, Report, Verdict  # noqa: E402

if TYPE_CHECKING:  # what needs vLLM's environment is imported once that is known to be there
    from gpu_bench import Bench
    from gpu_rows import Row

LIMIT_S = 300
KINDS = ("dense", "hybrid", "moe")
OPTIONS = {"dense": "MODEL", "hybrid": "HYBRID", "moe": "MOE"}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    for name in ("vllm", "nixl", "zmq", "msgspec", "structlog"):
        if find_spec(name) is None:
            return _wrong(
                f"this Python ({sys.executable}) has no {name!r}: pip install vllm nixl, and pdbus beside them"
            )
    named = {kind: folder for kind, folder in zip(KINDS, (given.model, given.hybrid, given.moe), strict=True) if folder}
    for kind, folder in named.items():
        for file in ("config.json", "tokenizer.json"):
            if not (Path(folder) / file).is_file():
                return _wrong(
                    f"{OPTIONS[kind]}={folder}: there is no {file}; name a model's folder (nothing is downloaded)"
                )
    import gpu_hosts
    import gpu_look

    if given.join:
        return gpu_hosts.join(given.model, given.host, given.join, Path(given.out))
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y-%m-%d %H:%M:%S %z")
    verdicts = run(given, {kind: Path(folder).resolve() for kind, folder in named.items()}, out)
    report = Report(
        verdicts=sorted(verdicts, key=lambda verdict: verdict.number), versions=gpu_look.versions(),
        devices=gpu_look.devices(), command=" ".join(["run.py", *(arguments or sys.argv[1:])]), began=began,
    )  # fmt: skip
    report.write(out)
    print(f"{report.summary()}: {out / 'report.md'}")
    decided = report.count(PASSED, IN_PART)
    if decided < given.at_least:
        return _wrong(f"{decided} rows passed, at least {given.at_least} were to", 1)
    return 1 if report.count(FAILED) else 0


def run(given: argparse.Namespace, named: Mapping[str, Path], out: Path) -> list[Verdict]:
    import gpu_hosts
    import gpu_look
    import gpu_models
    from gpu_bench import Bench
    from gpu_rows import ROWS, due

    gpus = [] if given.cpu else gpu_look.gpus()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="pdbus-tiny") as folder:
        missing = [kind for kind in KINDS if kind not in named] if given.tiny or not gpus else []
        models = {**named, **{kind: gpu_models.tiny(kind, Path(folder)) for kind in missing}}
        with Bench(gpus, models, given.full, out, 3600 if given.full else given.limit_s) as bench:
            for row in due((*ROWS, gpu_hosts.ROW), given.rows):
                why = ""
                if row.model not in models:
                    why = f"no model: name a folder with {OPTIONS[row.model]}=DIR"
                elif len(gpus) < row.gpus and (gpus or not row.cpu):
                    why = f"GPUs that it needs: {row.gpus}; that are here: {len(gpus)}"
                elif row.hosts > 1 and not given.host:
                    why = "it needs two hosts: HOST=ADDRESS here, and the second command on the other host"
                title = f"{row.number:>2}. {row.title}"
                if why:
                    verdicts.append(Verdict(number=row.number, title=row.title, why=why))
                else:
                    print(f"==> {title}", flush=True)
                    bench.row = row.number
                    shown = (f"{row.model}: {'tiny, random' if row.model in missing else models[row.model]}",)
                    verdicts.append(_one(row, bench, shown, given))
                print(f"    {title}: {verdicts[-1].status}" + (f" ({why})" if why else ""), flush=True)
                for check in verdicts[-1].checks:
                    if check.ok is False:
                        print(f"    fails: {check.what} ({check.found})", flush=True)
    return verdicts


class OutOfTime(Exception):
    """A row took longer than it may."""


def _one(row: Row, bench: Bench, models: tuple[str, ...], given: argparse.Namespace) -> Verdict:
    """Whatever the row raises is a check that failed."""

    def over(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"it took longer than {given.limit_s} s")

    bench.host = given.host
    began = time.monotonic()
    signal.signal(signal.SIGALRM, over)
    signal.alarm(0 if given.full else given.limit_s)
    try:
        checks = row.run(bench)
    except Exception as error:
        checks = [Check("it ran to its end", False, " ".join(f"{type(error).__name__}: {error}".split())[:500])]
        tails = _tails(bench.logs)
        signal.alarm(0)
        bench.close()
    else:
        tails = _tails(bench.logs) if any(check.ok is False for check in checks) else {}
    finally:
        signal.alarm(0)
    return Verdict(number=row.number, title=row.title, checks=tuple(checks), seconds=time.monotonic() - began,
                   models=models, logs=str(bench.logs), tails=tails)  # fmt: skip


def _tails(logs: Path) -> dict[str, str]:
    return {
        path.stem: "\n".join(path.read_text(errors="replace").splitlines()[-12:]) for path in sorted(logs.glob("*.log"))
    }


def _wrong(sentence: str, code: int = 2) -> int:
    print(f"test-gpu: error: {sentence}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="test-gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", metavar="DIR", help="a dense model's folder, Qwen3-8B or alike")
    parser.add_argument("--moe", default="", metavar="DIR", help="a mixture of experts")
    parser.add_argument("--hybrid", default="", metavar="DIR", help="a model with sliding windows: gpt-oss, Gemma 3")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny random models for what is not named, as without a GPU"
    )
    parser.add_argument("--cpu", action="store_true", help="as on a machine without a GPU")
    parser.add_argument("--full", action="store_true", help="each row as it stands, however long it takes")
    parser.add_argument("--rows", type=int, nargs="*", default=[], metavar="N", help="these alone")
    parser.add_argument("--host", default="", metavar="ADDRESS", help="row 10: of this host, for the other one")
    parser.add_argument("--join", default="", metavar="ADDRESS", help="row 10, on the other host: of the first one")
    parser.add_argument("--out", default="out/test-gpu", metavar="DIR", help="for report.md, report.json and logs")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, metavar="SECONDS", help="for each row (--full: none)")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="exit code 1 where fewer rows pass")
    return parser


if __name__ == "__main__":
    sys.exit(main())
