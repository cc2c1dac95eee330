"""The client library: submit prompts, stream what comes, whatever happens to the ranks in between."""

from pdbus.names import check_names

check_names()  # before `bus` is imported

from pdbus.client.aio import AsyncClient, AsyncStream
from pdbus.client.options import Options
from pdbus.client.output import Piece, Result
from pdbus.client.sync import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Options", "Piece", "Result", "Stream"]
