"""Somebody's dispatcher for the `peers` benchmark: pushes what it pulls to one rank after the other, and spins.

    python -P -m fake_peer TAKES RANK...        (PYTHONPATH=tests/support; endpoints)

Each line on stdin is answered with how often it has looked for a request.
"""

from __future__ import annotations

import os
import sys
import threading

import zmq


def main(takes: str, *ranks: str) -> None:
    looks = 0

    def answer() -> None:
        for _ in sys.stdin:
            print(looks, flush=True)
        os._exit(0)

    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.connect(takes)
    pushes = []
    for rank in ranks:
        pushes.append(context.socket(zmq.PUSH))
        pushes[-1].connect(rank)
    threading.Thread(target=answer, daemon=True).start()
    print("READY", flush=True)
    sent = 0
    while True:
        looks += 1
        try:
            request = pull.recv(zmq.NOBLOCK)
        except zmq.Again:
            continue
        pushes[sent % len(pushes)].send(request)
        sent += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
