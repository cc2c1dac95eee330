"""An engine that splits prefill from decode, and moves KV caches by a connector of its own: a toy that shouts.

    python -m controller --with-broker                       # in one terminal
    python examples/embed_connector.py prefill               # in a second
    python examples/embed_connector.py decode                # in a third
    pdbus generate --raw "hello" --max-tokens 5              # in a fourth: HELLO
Its KV cache of a prompt is what it will say, its connector is a folder, and a handle is the name of a file there.
"""

import signal
import sys
import tempfile
from pathlib import Path

from bus import default_bus, default_controller
from nodes.link import Cancel, RankFacts, RankLink, Release, Start

FACTS = RankFacts(model="toy", max_context=8192, vocab_size=259, kv_transfer="folder", handle_margin_s=1.0)


def main(role, bus: str = default_bus(), controller: str = default_controller(), instance: str = "") -> None:
    instance = instance or f"toy-{role}"
    held, running = {}, {}  # prefill: the file of each KV cache; decode: what each request has still to say
    with (
        tempfile.TemporaryDirectory(prefix="pd") as own,
        RankLink(bus, controllers=[controller], role=role, instance=instance, facts=FACTS, data=f"ipc://{own}") as link,
    ):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: link.drain())
        print(f"READY instance={instance}" if link.wait_ready(60) else "no bus or no controller yet", flush=True)
        while not link.drained:
            for order in link.poll(timeout_s=0.0 if running else 0.05):
                match order:
                    case Start(leg=leg) if role == "prefill":
                        text = bytes(token - 3 for token in leg.prompt if token >= 3)  # byte b is token 3 + b
                        text = text[: len(text) - leg.offset].upper()[leg.offset :] or b"?"  # said before: offset
                        held[leg] = Path(own, f"kv-{leg.seq}")
                        held[leg].write_bytes(text)
                        link.held(leg, 3 + text[0], bytes(held[leg]), valid_s=60.0)
                    case Start(leg=leg):  # the handle has more than `handle_margin_s` left
                        try:
                            running[leg] = iter(Path(leg.handle.data.decode()).read_bytes()[: leg.max_tokens])
                            link.fetched(leg)  # prefill may let go of it
                        except OSError as error:
                            link.fail(leg, "kv_failed", str(error))
                    case Cancel(leg=leg) | Release(leg=leg):
                        running.pop(leg, None)
                        if leg in held:
                            held.pop(leg).unlink()
            for leg, rest in list(running.items()):  # one forward step: a token of each
                token = next(rest, None)
                if token is not None:
                    link.output(leg, [3 + token])
                else:
                    del running[leg]
                    link.finish(leg)


if __name__ == "__main__":
    main(*sys.argv[1:])
