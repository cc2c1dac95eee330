"""Bearer keys: the names and quotas of an edge's clients. The file is read again when it has changed.

    [alice]
    key = "sk-..."             # or its SHA-256: sha256 = "hex"
    requests_in_flight = 16    # this and the next two: optional
    requests_per_minute = 600
    tokens_per_minute = 200000
    slo_class = "interactive"  # optional: for requests that name none
    operator = true            # optional: it may look at the fleet

Each of several edges counts by itself. Owns the file and the counts; sends no answers.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from bus.errors import ConfigError
from bus.runtime.keys import check_private
from bus.runtime.logs import get_logger
from pdbus.edge.errors import HttpError

LIMITS = ("requests_in_flight", "requests_per_minute", "tokens_per_minute")
SLO_CLASS_MAX = 32  # characters, as in a submit
_MINUTE_S = 60.0

log = get_logger("edge")


@dataclass(slots=True)
class Allowance:
    """A token bucket: it fills evenly with `per_minute`, and holds one minute's amount. The caller takes from `left`,
    which may fall below 0; `wait_s` is then positive until it has refilled. `at` is when it was last filled, in
    seconds."""

    per_minute: int
    left: float
    at: float = 0.0

    def wait_s(self, now: float, least: int = 1) -> float:
        """Return the seconds until `least` is left; 0: it is left now."""
        self.left = min(self.per_minute, self.left + (now - self.at) * self.per_minute / _MINUTE_S)
        self.at = now
        return 0.0 if self.left >= least else (least - self.left) * _MINUTE_S / self.per_minute


@dataclass(slots=True, eq=False)
class Key:
    """A client's key: its name, limits (0: none) and what is left of them."""

    name: str
    requests_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    slo_class: str = ""
    operator: bool = False
    in_flight: int = 0
    _requests: Allowance = field(init=False)
    _tokens: Allowance = field(init=False)

    def __post_init__(self) -> None:
        self._requests = Allowance(self.requests_per_minute, self.requests_per_minute)
        self._tokens = Allowance(self.tokens_per_minute, self.tokens_per_minute)

    def enter(self, now: float, count: int = 1, begun: int = 0) -> None:
        """Count `count` requests as begun, of which `begun` were counted before; `leave` must follow. Raises HttpError
        429 when a quota is used up, and 400 when it could never admit this many; then nothing is counted."""
        for limit, when in ((self.requests_in_flight, "under way"), (self.requests_per_minute, "a minute")):
            if 0 < limit < count:
                why = f"each answer is a request: {count} of them, and the key {self.name!r} may have {limit} {when}"
                raise HttpError(400, why, code="quota_exceeded", param="n")
        more = count - begun
        if 0 < self.requests_in_flight < self.in_flight + more:
            raise HttpError(
                429, f"the key {self.name!r} has {self.in_flight} requests under way", code="quota_exceeded"
            )
        for allowance, least, what in ((self._requests, more, "requests"), (self._tokens, 1, "tokens")):
            if allowance.per_minute and (wait_s := allowance.wait_s(now, least)):
                why = f"the key {self.name!r} may use {allowance.per_minute} {what} a minute"
                raise HttpError(429, why, code="quota_exceeded", retry_after_s=wait_s)
        self._requests.left -= more
        self.in_flight += more

    def charge(self, tokens: int) -> None:
        """Take prompt or output tokens from the quota, which may fall below 0; a negative number gives them back."""
        self._tokens.left -= tokens

    def leave(self, count: int = 1) -> None:
        """Count `count` requests as ended."""
        self.in_flight -= count

    def terms(self) -> tuple[int | str, ...]:
        """Return the limits and rights, to see whether the file has changed them."""
        limits = self.requests_in_flight, self.requests_per_minute, self.tokens_per_minute
        return *limits, self.slo_class, self.operator


class Keys:
    """The keys of one file. Raises ConfigError when it holds none or is invalid, or when other users may read it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = _stamp(self._path)
        self._keys = _read(self._path)

    def find(self, authorization: bytes) -> Key | None:
        """Return the key of the header's value `Bearer ...`; None: there is no such key."""
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._keys.get(hashlib.sha256(token.strip()).hexdigest())

    def holds(self, key: Key) -> bool:
        """Return true if the file still has the key, and with the same terms."""
        return any(each is key for each in self._keys.values())

    def refresh(self) -> None:
        """Read the file again if it has changed; keys with the same name and limits keep their counts. An invalid file
        is logged, and the keys stay as they were."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            fresh = _read(self._path)
        except ConfigError as error:
            log.error("api_keys.unreadable", error=str(error))
            return
        before = {key.name: key for key in self._keys.values()}
        for digest, key in fresh.items():
            known = before.get(key.name)
            if known is not None and known.terms() == key.terms():
                fresh[digest] = known  # keeps its counts
        self._keys = fresh
        log.info("api_keys.read", keys=len(fresh))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _read(path: Path) -> dict[str, Key]:
    """Return the keys of a file by the SHA-256 of each, so that the time of a look-up tells nothing about a key."""
    try:
        check_private(path)
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    keys: dict[str, Key] = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {name} stands outside of a [name]")
        if strange := entry.keys() - {"key", "sha256", "slo_class", "operator", *LIMITS}:
            choices = ", ".join(("key", "sha256", "slo_class", "operator", *LIMITS))
            raise ConfigError(f"{path}: [{name}] has {min(strange)!r}; choose from {choices}")
        slo_class = entry.get("slo_class", "")
        if not isinstance(slo_class, str) or len(slo_class) > SLO_CLASS_MAX:
            raise ConfigError(f"{path}: the slo_class of [{name}] is a name of at most {SLO_CLASS_MAX} characters")
        limits = {limit: entry.get(limit, 0) for limit in LIMITS}
        if not all(isinstance(value, int) and value >= 0 for value in limits.values()):
            raise ConfigError(f"{path}: the limits of [{name}] must be whole numbers from 0 (none) on")
        operator = entry.get("operator", False)
        if not isinstance(operator, bool):
            raise ConfigError(f"{path}: operator of [{name}] is true or false")
        digest = _digest(entry)
        if digest is None:
            raise ConfigError(f"{path}: [{name}] needs key (8 characters or more) or sha256 (64 of hex)")
        if digest in keys:
            raise ConfigError(f"{path}: [{name}] has the key of [{keys[digest].name}]")
        keys[digest] = Key(name, **limits, slo_class=slo_class, operator=operator)
    if not keys:
        raise ConfigError(f'{path} holds no key; write one like: [alice] and below it key = "..."')
    return keys


def _digest(entry: dict[str, object]) -> str | None:
    key, digest = entry.get("key"), entry.get("sha256")
    if isinstance(key, str) and len(key) >= 8 and digest is None:
        return hashlib.sha256(key.encode()).hexdigest()
    if isinstance(digest, str) and re.fullmatch("[0-9a-fA-F]{64}", digest) and key is None:
        return digest.lower()
    return None
