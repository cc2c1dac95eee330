"""The elements of the screen's lines: colours, bars, small graphs, labelled facts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pdbus.fleet.formatting import quantile_of

PLAIN, DIM, HEAD, CHOSEN = "not dim", "dim", "bold on grey23", "on grey37"
_STATES = {"ready": "green", "starting": "cyan", "draining": "yellow", "gone": "bright_black"}  # other states: red
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STEPS = " ▁▂▃▄▅▆▇█"


def colour_of(state: str) -> str:
    """Return the style of a rank's state; any other word is red."""
    return _STATES.get(state, "bold red")


def warning(count: int) -> str:
    """Return the style of a count that should be 0: plain if it is, else yellow."""
    return "yellow" if count else PLAIN


def bar(value: float | None, width: int) -> Text:
    """Return a bar of `width` characters that is full at a `value` of 1 or more; None is a `-` of the same width."""
    if value is None:
        return Text.assemble(("-".ljust(width), DIM))
    full, part = divmod(round(8 * width * min(1.0, max(0.0, value))), 8)
    blocks = ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)
    colour = "green" if value < 0.7 else "yellow" if value < 0.95 else "red"
    return Text.assemble((blocks, f"{colour} on grey23"))


def spark(values: Sequence[float], width: int) -> str:
    """Return a graph of the last `width` values (or fewer), a character each, of eight heights. The greatest value has
    the full height; where all are 0, each has the least."""
    values = values[-width:]
    top = max(values, default=0.0)
    return "".join(_STEPS[max(1, round(8 * value / top))] if top else _STEPS[1] for value in values)


def fact(label: str, *facts: str | tuple[str, str]) -> Text:
    """Return a line with a label and facts; a fact is text, or text and its style."""
    line = Text.assemble((f" {label:<9}", DIM))
    for each in facts:
        text, style = each if isinstance(each, tuple) else (each, PLAIN)
        line.append(f"{text}  ", style=style)
    return line


def quantiles(counts: Sequence[int]) -> list[tuple[str, str]]:
    """Return median, p90 and p99 of latency counts (`bus.histogram`), each with its style, to be passed to `fact`;
    without any counts they read `-`."""
    return [(f"p{100 * q:.0f} {quantile_of(counts, q)}", "bold" if q == 0.5 else PLAIN) for q in (0.5, 0.9, 0.99)]
