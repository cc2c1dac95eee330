"""The figures of the README's table of methods are those of docs/notes/policies.md, range for range."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = {
    cells[0].strip(" `"): (cells[1].strip(), cells[3].strip())  # mean TTFT and p99, in seconds
    for line in (ROOT / "docs" / "notes" / "policies.md").read_text(encoding="utf-8").splitlines()
    if len(cells := line.strip("|").split("|")) == 11
}
ROWS = re.findall(
    r"^\| `(\w+)`(, reports that overwrite[^|]*)? \| (.+?) s(?:\*\*)? \| (.+?) s \|(.*)\|$",
    (ROOT / "README.md").read_text(encoding="utf-8"),
    re.M,
)


def test_the_table_is_there() -> None:
    assert len(ROWS) == 5
    assert {"oracle", "overwrite", *(row[0] for row in ROWS)} <= MEASURED.keys()


@pytest.mark.parametrize(("method", "overwrites", "mean", "p99", "remark"), ROWS)
def test_a_figure_is_the_same_wherever_it_stands(
    method: str, overwrites: str, mean: str, p99: str, remark: str
) -> None:
    assert MEASURED["overwrite" if overwrites else method] == (mean.strip("*"), p99)
    if "perfect" in remark:
        mean, p99 = MEASURED["oracle"]
        assert f"{mean} s and {p99} s" in remark
