"""The check of plain English finds what is planted, and its list of what is not clean yet is true."""

from __future__ import annotations

import plain_english
import pytest

CLEAN = '''
"""A queue of requests."""

WAIT_S = 1.0  # seconds; an operator who sets less sees timeouts


class Queue:
    """Requests in the order in which they came."""

    def send(self, text: str) -> None:
        """Send one request; ConfigError if its text is empty."""
        raise ValueError(f"the text is empty: {text!r}")
'''


def test_clean_source_has_no_violation() -> None:
    assert plain_english.violations(CLEAN) == []


@pytest.mark.parametrize(
    ("clean", "planted", "rule", "line"),
    [
        ("Send one request; ConfigError", "Whether one request; ConfigError", "beginning", 11),
        ("A queue of requests.", "What is a queue.", "beginning", 2),
        ("Requests in the order", "Of requests, the order", "beginning", 8),
        ("an operator who sets less", "a rank who sets less", "who", 4),
        ("Requests in the order in which they came", "Requests.\n\n    Whoever comes", "phrase", 10),
        ("Send one request", "Send one request anew", "phrase", 11),
        ("the text is empty:", "an empty text makes no sense:", "phrase", 12),
        ("def send(", "def tell_all(", "name", 10),
        ("text: str", "told: str", "name", 10),
        ("class Queue", "class LoadSaid", "name", 7),
        ("WAIT_S =", "said_s =", "name", 4),
    ],
)
def test_planted_violation_is_found(clean: str, planted: str, rule: str, line: int) -> None:
    assert CLEAN.count(clean) == 1
    found = plain_english.violations(CLEAN.replace(clean, planted))
    assert [(at, broken) for at, broken, _ in found] == [(line, rule)]


def test_planted_phrase_of_a_page_is_found() -> None:
    assert [at for at, _, _ in plain_english.in_text("# Queue\n\nIt waits for ever.\n")] == [3]
