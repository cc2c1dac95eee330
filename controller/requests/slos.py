"""SLO classes: limits of the times for tokens, under a name that requests or clients' keys can have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from bus.errors import ConfigError
from bus.wire.codes import Refusal
from bus.wire.messages import NAME, Submit

_FORM = "--slo-class NAME=TTFT[,TPOT] in seconds, like interactive=0.5,0.03"
_NAME_MAX = 32  # as `Submit.slo_class`


@dataclass(frozen=True)
class SloClass:
    """The limits of the time to the first token and per further token, in seconds; `tpot_s` 0: the controller's own."""

    name: str
    ttft_s: float
    tpot_s: float = 0.0


def parse_slo_class(text: str) -> SloClass:
    """Return the class in the option's text. Raises ConfigError, with the right form, for any other text."""
    name, _, times = text.partition("=")
    if NAME.fullmatch(name) is None or len(name) > _NAME_MAX:
        raise ConfigError(f"--slo-class {text!r}: a name has 1 to {_NAME_MAX} of A-Z a-z 0-9 . _ - ({_FORM})")
    try:
        seconds = [float(each) for each in times.split(",")]
    except ValueError:
        seconds = []
    if len(seconds) not in (1, 2) or not all(0 < each < math.inf for each in seconds):
        raise ConfigError(f"--slo-class {text!r}: one or two times, above 0 ({_FORM})")
    return SloClass(name, *seconds)


class SloClasses:
    """The classes of one controller, by name."""

    def __init__(self, classes: Iterable[SloClass]) -> None:
        self._classes = {each.name: each for each in classes}

    def settle(self, submit: Submit, client: str) -> Submit:
        """Return `submit` with the times of its class, where it has none itself. Without a class name it gets the class
        with the name of its client's key, if there is one. Raises Refusal for an unknown class."""
        if not self._classes and not submit.slo_class:
            return submit
        named = self._classes.get(submit.slo_class or client.partition("/")[2])
        if named is None:
            if submit.slo_class:
                known = ", ".join(sorted(self._classes)) or "none"
                raise Refusal("bad_request", f"no slo_class {submit.slo_class!r} is known here ({known})")
            return submit
        return structs.replace(
            submit, ttft_slo_s=submit.ttft_slo_s or named.ttft_s, tpot_slo_s=submit.tpot_slo_s or named.tpot_s
        )
