"""The other floor of `rooms`, what engines do today: HTTP on an asyncio server, asked with `requests`. A room is the
number of a request, by which its decode rank finds the rank that prefills it.

`POST /register_dp_rank` takes `{"bootstrap_room", "dp_rank"}`, `POST /query_dp_ranks` takes `{"bootstrap_rooms"}`.
"""

from __future__ import annotations

import os
import threading
import time

from benchmarks.child import STDIN, Parent


def server(parent: Parent) -> None:
    """Serve on a free port of 127.0.0.1 until the parent has gone; the port is sent to it as a JSON line after
    READY."""
    from aiohttp import web

    ranks: dict[int, int] = {}

    async def register(request: web.Request) -> web.Response:
        body = await request.json()
        ranks[body["bootstrap_room"]] = body["dp_rank"]
        return web.Response(text="OK")

    async def query(request: web.Request) -> web.Response:
        rooms = (await request.json())["bootstrap_rooms"]
        return web.json_response({str(room): ranks[room] for room in rooms if room in ranks})

    async def listening(app: web.Application) -> None:
        threading.Thread(target=leave_with_parent, daemon=True).start()

    def leave_with_parent() -> None:
        while os.read(STDIN, 4096):
            pass
        os._exit(0)

    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    app = web.Application()
    app.on_startup.append(listening)
    app.router.add_post("/register_dp_rank", register)
    app.router.add_post("/query_dp_ranks", query)
    parent.ready()
    parent.send(listener.getsockname()[1])
    web.run_app(app, sock=listener, print=None, access_log=None)


def asker(parent: Parent, port: int) -> None:
    """Answer each command (`count`): register so many rooms at `port`, ask for each after its registration, and return
    the seconds that each pair of calls took."""
    import requests

    base = f"http://127.0.0.1:{port}"

    def register_and_query(count: int) -> list[float]:
        times = []
        for room in range(count):
            began = time.perf_counter()
            requests.post(f"{base}/register_dp_rank", json={"bootstrap_room": room, "dp_rank": room % 8}, timeout=5)
            answer = requests.post(f"{base}/query_dp_ranks", json={"bootstrap_rooms": [room]}, timeout=5)
            times.append(time.perf_counter() - began)
            assert answer.json() == {str(room): room % 8}, answer.text
        return times

    parent.serve(register_and_query)
