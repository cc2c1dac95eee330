"""What a user sends in: each row with its verdict, what was seen, versions, devices, where logs are. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks import Check

PASSED, IN_PART, FAILED, NOT_RUN = "passed", "passed in part", "failed", "not run"
LAST_LINES = 12
WIDEST = 300  # of a line of them


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one row. `why` says why it did not run; `tails` are the last lines of each part's log, where it failed."""

    number: int
    title: str
    checks: tuple[Check, ...] = ()
    why: str = ""
    seconds: float = 0.0
    models: tuple[str, ...] = ()
    logs: str = ""
    tails: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`passed` alone where each check was decided and held: what was not run never counts as passed."""
        decided = [check.ok for check in self.checks if check.ok is not None]
        if False in decided:
            return FAILED
        if not decided:
            return NOT_RUN
        return PASSED if len(decided) == len(self.checks) else IN_PART


@dataclass(frozen=True, kw_only=True)
class Report:
    verdicts: Sequence[Verdict]
    versions: Mapping[str, str]
    devices: Sequence[str]
    command: str
    began: str

    def count(self, *statuses: str) -> int:
        return sum(verdict.status in statuses for verdict in self.verdicts)

    def summary(self) -> str:
        counts = {status: self.count(status) for status in (PASSED, IN_PART, FAILED, NOT_RUN)}
        return ", ".join(f"{count} {status}" for status, count in counts.items() if count)

    def as_json(self) -> str:
        return json.dumps({
            "began": self.began, "command": self.command, "versions": dict(self.versions),
            "devices": list(self.devices), "rows": [_plain(verdict) for verdict in self.verdicts],
        }, indent=1)  # fmt: skip

    def as_markdown(self) -> str:
        lines = [f"# pdbus and vLLM on a GPU: {self.summary()}", "", f"Began {self.began}; `{self.command}`", ""]
        lines += [f"- {name}: {version}" for name, version in self.versions.items()]
        lines += [f"- device: {device}" for device in self.devices]
        lines += ["", "| row | | verdict | seconds | models |", "| ---: | --- | --- | ---: | --- |"]
        for it in self.verdicts:
            lines.append(f"| {it.number} | {it.title} | {it.status} | {it.seconds:.0f} | {', '.join(it.models)} |")
        for it in self.verdicts:
            lines += ["", f"## {it.number}. {it.title}: {it.status}", ""]
            lines += [it.why] if it.why else []
            lines += [f"- {_mark(check)}: {check.what} ({check.found})" for check in it.checks]
            lines += ["", f"Logs: {it.logs}"] if it.logs else []
            for part, tail in it.tails.items():
                lines += [
                    "",
                    f"`{part}`:",
                    "",
                    "```",
                    *(line[:WIDEST] for line in tail.splitlines()[-LAST_LINES:]),
                    "```",
                ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        (folder / "report.md").write_text(self.as_markdown(), encoding="utf-8")
        (folder / "report.json").write_text(self.as_json(), encoding="utf-8")


def _mark(check: Check) -> str:
    return {True: "holds", False: "**fails**", None: "not run"}[check.ok]


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "row": verdict.number, "title": verdict.title, "status": verdict.status, "why": verdict.why,
        "seconds": round(verdict.seconds, 1), "models": list(verdict.models), "logs": verdict.logs,
        "tails": dict(verdict.tails), "checks": [check._asdict() for check in verdict.checks],
    }  # fmt: skip
