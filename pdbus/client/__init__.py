"""The client library: submit prompts, stream what comes, whatever happens to the ranks in between.

`sync` and `aio` are its two faces over `base`. A request's `options` become its record (`request`); `core` moves it
from event to event, `traffic` carries its messages, which a thread of its own (`channel`) or the caller's event loop
(`loop_channel`) runs, and `output` is what the caller gets.
"""

from pdbus.names import check_names

check_names()  # before `bus` is imported

from bus.wire.messages import TokenLogprobs
from pdbus.client.aio import AsyncClient, AsyncStream
from pdbus.client.options import Options, choices
from pdbus.client.output import Piece, Result
from pdbus.client.sync import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Options", "Piece", "Result", "Stream", "TokenLogprobs", "choices"]
