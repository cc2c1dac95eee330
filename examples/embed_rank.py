"""An engine with a scheduler of its own, as a rank of a cluster: a toy that says the prompt again, in capitals.

    python -m controller --with-broker                  # in one terminal
    python examples/embed_rank.py                       # in a second
    pdbus generate --raw "hello" --max-tokens 5         # in a third: HELLO

Ctrl-C drains it; a controller that restarts finds it again by itself.
"""

import signal
import sys
import tempfile
from collections import deque

from bus import default_bus, default_controller
from nodes.link import Cancel, RankFacts, RankLink, Start

SLOTS = 4  # requests computed at once


def main(bus: str = default_bus(), controller: str = default_controller(), instance: str = "toy") -> None:
    waiting: deque = deque()  # the scheduler: what waits, and what each running request has still to say
    running: dict = {}
    facts = RankFacts(model="toy", max_context=8192, max_running=SLOTS, vocab_size=259)
    with (
        tempfile.TemporaryDirectory(prefix="pd") as folder,
        RankLink(
            bus, controllers=[controller], role="unified", instance=instance, facts=facts, data=f"ipc://{folder}"
        ) as link,
    ):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: link.drain())
        print(f"READY instance={instance}" if link.wait_ready(60) else "no bus or no controller yet", flush=True)
        while not link.drained:
            for order in link.poll(timeout_s=0.0 if running else 0.05):  # once a step
                match order:
                    case Start(leg=leg):
                        waiting.append(leg)
                    case Cancel(leg=leg):
                        running.pop(leg, None)
                        if leg in waiting:
                            waiting.remove(leg)
            while waiting and len(running) < SLOTS:
                leg = waiting.popleft()
                text = bytes(token - 3 for token in leg.prompt if token >= 3)  # byte b is token 3 + b
                said = leg.offset  # a resumed request's prompt ends with what was said before
                running[leg] = iter((text[: len(text) - said].upper() or b"?")[said:][: leg.max_tokens])
            for leg, rest in list(running.items()):  # one forward step: a token of each
                token = next(rest, None)
                if token is None:
                    del running[leg]
                    link.finish(leg, "stop")
                else:
                    link.output(leg, [3 + token])


if __name__ == "__main__":
    main(*sys.argv[1:])
