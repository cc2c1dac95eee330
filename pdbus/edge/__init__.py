"""The HTTP edge (`pdbus serve`): OpenAI's API in front of a cluster, as a client of the bus like any other.

It keeps no state that a request needs, so any number may run side by side, and none stands between controller, ranks
and each other. `app` is the whole of it over ASGI, `server` the process. A request is read by `fields`, becomes token
ids in `texts`, is run by `generation` over the client library, and is written by `answers`.
"""

from __future__ import annotations

from pdbus.edge.config import EdgeConfig

__all__ = ["EdgeConfig"]
