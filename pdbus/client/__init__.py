"""The client library: it submits prompts and streams the output, also when ranks fail in between.

`sync` and `aio` are its two interfaces, over `base`. The `options` of a request become its record (`request`); `core`
decides what happens to it, `traffic` carries its messages, run by a thread of the library (`channel`) or by the
caller's event loop (`loop_channel`), and `output` has the classes that the caller gets.
"""

from pdbus.names import check_names

check_names()  # before `bus` is imported

from bus.wire.messages import TokenLogprobs
from pdbus.client.aio import AsyncClient, AsyncStream
from pdbus.client.options import Options, choices
from pdbus.client.output import Piece, Result
from pdbus.client.sync import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Options", "Piece", "Result", "Stream", "TokenLogprobs", "choices"]
