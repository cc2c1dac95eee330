"""A model's chat template, filled in as Hugging Face's `apply_chat_template` does, in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import metadata
from typing import Any

from bus.errors import ConfigError
from nodes.own.engines.needs import needed_by

JINJA_MIN = (3, 1, 6)  # the sandbox of older ones lets a template out (CVE-2024-56201, -56326, CVE-2025-27516)


class ChatTemplate:
    """A chat template. `source` is Jinja; `tokens` are special tokens by name, such as `bos_token`. With an error in
    the source, `fill` raises ConfigError; other texts of the model still work."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        self._template: Any = None
        self._error = ""
        try:
            self._template = _environment().from_string(source)
        except ConfigError as error:
            self._error = str(error)
        except Exception as error:  # TemplateSyntaxError, or an error of a filter on a constant
            self._error = f"the model's chat template is invalid: {error}"

    def fill(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        """Return the text of a conversation; each message has `role` and `content`. With `answer`, it ends where the
        assistant's answer begins. Raises ConfigError for an invalid template, or one that refuses the messages."""
        if self._template is None:
            raise ConfigError(self._error)
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages], tools=None, documents=None,
                add_generation_prompt=answer, **self._tokens,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from None
        return text


@cache
def _environment() -> Any:
    """Return a Jinja environment with the extensions, filters and functions that templates expect."""
    with needed_by("a chat template"):
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    version = metadata.version("jinja2")
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < JINJA_MIN:
        least = ".".join(map(str, JINJA_MIN))
        raise ConfigError(f"chat templates need jinja2 {least}, this is {version}: pip install 'jinja2>={least}'")

    class Generation(Extension):
        """Renders `{% generation %}`, which marks an assistant's words for training, as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: int | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment
