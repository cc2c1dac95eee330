"""What an edge makes of the fields of an engine's own requests, at the values that the engine gives them itself."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pdbus.edge import fields
from pdbus.edge.errors import HttpError

MODEL = "model"  # an engine may have a name of its own for "the one that is served"


def refused_at_defaults(kind: type, body: dict[str, Any], record: Any) -> dict[str, str]:
    """Return the fields of `record` (pydantic's, or a dataclass) that `kind` refuses at their defaults, with the
    reasons. `body` has what `kind` cannot do without."""
    refused = {}
    for name, value in _defaults(record).items():
        if name not in body and name != MODEL:
            try:
                fields.read(kind, json.dumps({**body, name: value}).encode())
            except HttpError as error:
                refused[name] = error.message
    return refused


def _defaults(record: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(record):
        return {
            each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            for each in dataclasses.fields(record)
            if (each.default, each.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        }
    known = record.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in known if not field.is_required()}
