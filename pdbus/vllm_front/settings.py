"""The settings of a front, from environment variables, which vLLM's further processes inherit. Pure: the environment is
an argument."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from bus.endpoints import check_base
from bus.errors import ConfigError

CONTROLLER = "PDBUS_VLLM_CONTROLLER"
KEYS = "PDBUS_VLLM_KEYS"
KEY_NAME = "PDBUS_VLLM_KEY_NAME"
MODEL = "PDBUS_VLLM_MODEL"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a front."""

    controller: str  # its base address
    keys: str = ""  # directory of CURVE keys, for tcp to the cluster
    key_name: str = ""  # the name of its own key there (a client's); empty: edge, else the only one
    model: str = ""  # the model's name on the bus; empty: the served name, else the only model of the cluster


def read(environ: Mapping[str, str]) -> Settings:
    """Return the settings in these environment variables. Raises ConfigError for an address that is none, or for a key
    without a directory."""
    settings = Settings(
        controller=environ.get(CONTROLLER, ""),
        keys=environ.get(KEYS, ""),
        key_name=environ.get(KEY_NAME, ""),
        model=environ.get(MODEL, ""),
    )
    try:
        check_base(settings.controller)
    except ConfigError as error:
        raise ConfigError(f"{CONTROLLER}: {error}") from None
    if settings.key_name and not settings.keys:
        raise ConfigError(f"{KEY_NAME} needs {KEYS}: the directory of the key")
    return settings


def write(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Put the settings into the environment, for further processes; empty ones are removed from it."""
    values = {CONTROLLER: settings.controller, KEYS: settings.keys, KEY_NAME: settings.key_name, MODEL: settings.model}
    for name, value in values.items():
        environ.pop(name, None)
        if value:
            environ[name] = value
