"""The entry point `load`, which vLLM calls once in each of its processes. It does nothing unless
`PDBUS_VLLM_CONTROLLER` is set.

All checks are made in this function: an exception here ends vLLM, and one while this module is imported would only be
logged, after which vLLM would start engines of its own.
"""

from __future__ import annotations

import os

from bus.errors import BusError

VARIABLE = "PDBUS_VLLM_CONTROLLER"


def load() -> None:
    """Let this process's API server submit to the bus: the entry point of the group `vllm.general_plugins`. Exits with
    one line where this vLLM or its settings cannot do that."""
    if not os.environ.get(VARIABLE):
        return
    from pdbus.vllm_front.seams import install, serves_http
    from pdbus.vllm_front.settings import read

    try:
        if serves_http():
            install(read(os.environ))
    except BusError as error:
        raise SystemExit(f"pdbus: {error}") from None
