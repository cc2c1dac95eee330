"""Where plots put their figures."""

from __future__ import annotations

import pytest

from pdbus.lab.plots import _beside


@pytest.mark.parametrize(
    ("mean", "half", "side"), [(10, 2, "left"), (90, 2, "right"), (50, 30, "center"), (95, 90, "center")]
)
def test_a_figure_stands_within_its_axis(mean: float, half: float, side: str) -> None:
    """Beside its dot and interval on the side with room, else above them: never beyond the end of the axis."""
    at, _, align, up = _beside(mean, half, 100.0)
    assert align == side
    assert 0 <= at <= 100
    assert (up == "bottom") == (side == "center")
