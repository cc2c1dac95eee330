"""docs/api.md says what the docstrings say, of every public name."""

from __future__ import annotations

import api_page
import pytest


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
