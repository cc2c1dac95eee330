"""What a person sees of the chat page and does there."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Locator, Page
from visits import Visit

Go = Callable[[str], Visit]


def box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def turns(page: Page) -> Locator:
    return page.locator(".turn")


def ask(page: Page, question: str) -> None:
    box(page).fill(question)
    page.get_by_role("button", name="Send").click()


def state(page: Page) -> Locator:
    """The line on top."""
    return page.get_by_role("status")


def ranks(page: Page) -> Locator:
    return page.get_by_role("complementary", name="Ranks")


def error(page: Page) -> Locator:
    return page.locator(".error")
