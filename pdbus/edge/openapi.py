"""The OpenAPI document of an edge (its endpoints, fields and errors for programs), made from the types that requests
are read into, and a page that shows it. Pure."""

from __future__ import annotations

import html
from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from bus.wire.messages import RankStatus
from pdbus.edge import fields
from pdbus.edge.exchange import NUMBER_MAX, PRIORITY_MAX, RID_MAX
from pdbus.edge.keys import SLO_CLASS_MAX
from pdbus.edge.refused import REFUSED_BY_OPENAI

_POSTS: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (fields.Chat, "Answer a conversation, as OpenAI's chat completions."),
    "/v1/completions": (fields.Completion, "Continue prompts: texts or lists of token ids."),
    "/generate": (fields.Generate, "SGLang's generate: texts or token ids in, text and token ids out."),
    "/tokenize": (fields.Tokenize, "The token ids of a text or a conversation."),
    "/detokenize": (fields.Detokenize, "The text of token ids."),
}
_GETS: dict[str, tuple[str, str]] = {
    "/v1/models": ("The models that ranks serve.", "application/json"),
    "/load": ("The load of every rank, as the controller knows it.", "application/json"),
    "/health": ("200 while the process lives.", "text/plain"),
    "/ping": ("200 while the process lives, as /health.", "text/plain"),
    "/version": ("The version of this edge.", "application/json"),
    "/ready": ("200 while there is a ready rank for each role, else 503 and why not.", "text/plain"),
    "/metrics": ("Metrics for Prometheus.", "text/plain"),
}
_OPEN = ("/health", "/ping", "/version", "/ready", "/metrics")  # need no key
_STATUSES = {
    "400": "a field is wrong or not supported; `param` names it",
    "401": "no valid key",
    "404": "no such model",
    "408": "the body came too slowly",
    "409": "a live request has that id, or that room",
    "413": "the body is too long",
    "415": "not JSON",
    "429": "a quota is used up, or the cluster is overloaded: Retry-After says when to try again",
    "500": "a rank or the edge failed",
    "501": "the edge has no tokenizer for the model",
    "503": "nothing can serve it now: Retry-After says when to try again",
    "504": "its deadline passed",
}


def _header(name: str, what: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": what, "schema": schema}


_RID = _header(
    "x-request-id", f"The request's id, 1 to {RID_MAX} printable characters; it comes back.",
    type="string", minLength=1, maxLength=RID_MAX, pattern="^[!-~]*$",
)  # fmt: skip
_HEADERS = [
    _RID,
    _header(
        "x-request-deadline-s", "Seconds after which the answer is no longer wanted.",
        type="number", exclusiveMinimum=0, exclusiveMaximum=NUMBER_MAX,
    ),
    _header(
        "x-ttft-slo-s", "Seconds within which the first token is wanted (where the controller orders by SLO).",
        type="number", exclusiveMinimum=0, exclusiveMaximum=NUMBER_MAX,
    ),
    _header(
        "x-tpot-slo-s", "Seconds within which each further token is wanted, on average.",
        type="number", exclusiveMinimum=0, exclusiveMaximum=NUMBER_MAX,
    ),
    _header("x-slo-class", "The name of two SLOs that the controller knows.", type="string", maxLength=SLO_CLASS_MAX),
    _header(
        "x-session-id", "What the requests of one conversation have in common.",
        type="string", maxLength=fields.SESSION_MAX,
    ),
    _header("x-request-priority", "Higher goes first.", type="integer", minimum=-PRIORITY_MAX, maximum=PRIORITY_MAX),
    _header("traceparent", "W3C Trace Context; an invalid value is ignored.", type="string"),
    _header("tracestate", "W3C Trace Context; passed on unchanged.", type="string"),
]  # fmt: skip


@cache
def document() -> bytes:
    """Return the OpenAPI 3.1 document as JSON; made at the first call."""
    kinds = [kind for kind, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    errors = {status: {"description": what, **error} for status, what in _STATUSES.items()}
    paths: dict[str, Any] = {}
    for (path, (kind, what)), schema in zip(_POSTS.items(), schemas, strict=True):
        answer = {
            "description": "The answer; with `stream`, server-sent events.",
            "content": {"application/json": {}, "text/event-stream": {}},
        }
        paths[path] = {
            "post": {
                "summary": what,
                "parameters": _HEADERS if issubclass(kind, fields.OpenAiFields | fields.Generate) else [_RID],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": answer, **errors},
            }
        }
    for path, (what, media) in _GETS.items():
        responses: dict[str, Any] = {"200": {"description": what, "content": {media: {}}}}
        if path == "/ready":
            responses["503"] = {"description": "Why nothing can be served.", "content": {media: {}}}
        elif path not in _OPEN:
            responses["401"] = errors["401"]
        paths[path] = {"get": {"summary": what, "responses": responses, **({"security": []} if path in _OPEN else {})}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "pdbus serve", "version": metadata.version("pdbus")},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"bearer": []}, {}],
        }
    )


@cache
def page() -> bytes:
    """Return the document as an HTML page: each endpoint with its fields; made at the first call."""
    api = msgspec.json.decode(document())
    parts = [_HEAD, "<h1>pdbus serve</h1><p>The same <a href=/openapi.json>for programs</a>.</p>"]
    schemas = api["components"]["schemas"]
    inner = dict(schemas)  # the types of fields, without the bodies themselves
    for path, methods in api["paths"].items():
        for method, it in methods.items():
            parts.append(f"<h2>{method.upper()} {path}</h2><p>{html.escape(it['summary'])}</p>")
            if "requestBody" in it:
                reference = it["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                body = reference.rpartition("/")[2]
                inner.pop(body, None)
                parts.append(_fields(schemas[body]))
    parts.append("<h2>In fields</h2>")
    parts += [f"<h3>{name}</h3>{_fields(schema)}" for name, schema in inner.items() if "properties" in schema]
    parts.append("<h2>Headers</h2><table>")
    parts += [f"<tr><td><code>{each['name']}</code><td>{html.escape(str(each['description']))}" for each in _HEADERS]
    parts.append("</table><h2>Errors</h2><table>")
    parts += [f"<tr><td>{status}<td>{html.escape(what)}" for status, what in _STATUSES.items()]
    refused = ", ".join(f"<code>{name}</code>" for name in sorted(REFUSED_BY_OPENAI))
    parts.append(f"</table><p>Refused by name, unless they ask for nothing: {refused}.</p>")
    return "".join(parts).encode()


def _fields(schema: dict[str, Any]) -> str:
    """Return the fields as a table, required ones first."""
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{name}</code><td>{html.escape(_type(kind))}<td>{'required' if name in required else ''}"
        for name, kind in sorted(schema["properties"].items(), key=lambda field: field[0] not in required)
    )
    return f"<table>{''.join(rows)}</table>"


_HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<title>pdbus serve</title><link rel="icon" href="/pages/icon.svg"><link rel="stylesheet" href="/pages/base.css">'
    '<link rel="stylesheet" href="/pages/docs.css"><main>'
)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"[{_type(schema['items'])}]" if schema.get("items") else "[]"
    return str(schema.get("type", "any"))


def rank_row(rank: RankStatus) -> dict[str, Any]:
    """Return one rank in the form of the endpoint `/load`; figures are None before its first load report."""
    load = rank.load
    return {
        "rank": f"{rank.instance}/{rank.dp_rank}",
        "role": rank.role,
        "model": rank.model,
        "state": rank.state,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "kv_tokens": load.kv_tokens if load else None,
        "kv_capacity": load.kv_capacity if load else None,
        "estimate_tokens": rank.estimate_tokens,
    }
