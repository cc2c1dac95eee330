"""docs/api.md says what the docstrings say, of every public name."""

from __future__ import annotations

import api_page
import pytest
from griffe import Class, Function


@pytest.fixture(scope="module")
def names() -> dict[str, api_page.Name]:
    return api_page.public_names()


def test_the_page_is_what_the_docstrings_give(names: dict[str, api_page.Name]) -> None:
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(names), "run: make api"


def test_a_public_name_without_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_page, "OUTLINE", api_page.OUTLINE.replace("@ nodes RankLink", "@ nodes"))
    with pytest.raises(LookupError, match=r"nodes\.link\.embed\.RankLink"):
        api_page.public_names()


def test_every_public_name_method_and_field_is_explained(names: dict[str, api_page.Name]) -> None:
    assert not list(api_page.unsaid(names))


def test_of_whatever_lives_it_says_what_start_stop_fork_and_threads_may_do(names: dict[str, api_page.Name]) -> None:
    """That is each public class with calls, but for records and what others write (policies, runners)."""
    alive = {
        name.found.name
        for name in names.values()
        if isinstance(name.found, Class)
        and any(isinstance(member, Function) for _, member in name.members)
        and not name.fields
        and not {"Protocol", "Policy"} & {str(base) for base in name.found.bases}
    }
    section = api_page.OUTLINE.partition("## Start, stop, fork and threads")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    said = [name for row in rows for name in row[0].replace("`", "").split(", ")]
    assert sorted(said) == sorted(alive)
    assert all(len(row) == 5 and all(row) for row in rows)
    assert {"Broker", "Client", "AsyncStream", "LoadTable"} < alive
