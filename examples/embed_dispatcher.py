"""An engine that embeds the dispatcher in place of its own data-parallel controller.

Two engine ranks (here a toy scheduler that answers with one token; `embed_rank.py` shows a whole one) take requests
over ZeroMQ; the process that holds the requests dispatches to them without blocking.
"""

from __future__ import annotations

import tempfile
import threading

from bus.wire import codec
from bus.wire.messages import Params
from controller import ControllerConfig, Dispatcher
from nodes.link import RankFacts, RankLink, Start


def engine(link: RankLink) -> None:
    """What every engine has: a loop that takes requests in and says what has become of them."""
    while not link.drained:
        for order in link.poll(timeout_s=0.05):
            if isinstance(order, Start):
                link.output(order.leg, [order.leg.prompt[0]])
                link.finish(order.leg, "stop")


with tempfile.TemporaryDirectory(prefix="pd") as folder:
    config = ControllerConfig(
        bus=f"ipc://{folder}/bus", controller=f"ipc://{folder}/c", with_broker=True, unified_method="total_tokens"
    )
    facts = RankFacts(model="m", max_context=8192, block_tokens=16)
    with (
        Dispatcher(config) as dispatcher,  # ten lines from here
        RankLink(
            config.bus, controllers=[config.controller], role="unified", instance="engine", facts=facts,
            data=f"ipc://{folder}", dp_ranks=(0, 1), dp_size=2,
        ) as link,
    ):  # fmt: skip
        ranks = threading.Thread(target=engine, args=(link,))
        ranks.start()
        link.wait_ready(30)
        for n in range(4):  # a prompt of 100 token ids, and sampling parameters
            dispatcher.dispatch(f"request-{n}", [bytes(4 * 100), codec.encode(Params())], max_tokens=16)
        ended = 0
        while ended < 4:  # an engine would just poll once a step
            for answer in dispatcher.poll(timeout_s=0.1):
                ended += type(answer).__name__ in ("Done", "Failed")
                print(answer.rid, type(answer).__name__, getattr(getattr(answer, "decode", None), "dp_rank", ""))
    ranks.join()
