"""The load table alone, in a data-parallel controller of one's own: no process, thread or socket of pdbus.

Ranks report their load whenever they like, over whatever one has, and say how much they had taken in by then. The table
adds what is still on its way to them, so that each request counts exactly once and none is forgotten.
"""

from bus.wire.messages import Ack, Hello, Load
from controller import LoadTable
from controller.load.groups import Metric

ME = 1  # names this start of the controller in acknowledgements
table = LoadTable(ME)
ranks = [
    table.open(Hello("engine", n, 1, "unified", "m", 4, "ready", "", 8192, 100_000, 256, 16))  # what it can hold
    for n in range(4)
]
for rank in ranks:
    table.apply(rank.key, 1, Load(1, 0, 0, 0, 0, 0, 100_000, 256), now=0.0)  # its first report: idle
    table.set_ready(rank, True)
group = table.group("unified")


def dispatch(tokens: int) -> int:
    rank = group.least(Metric.TOKENS)
    assert rank is not None, "every rank is full: let the request wait"
    table.charge(rank, tokens)  # its estimate rises at once
    return rank.key[1]


print("to ranks", [dispatch(tokens) for tokens in (4000, 300, 200, 100, 100, 100)])
# rank 3 says: one request runs, with 100 tokens of KV cache, and that one is all that I had taken in from you
table.apply(ranks[3].key, 1, Load(2, 7, 1, 0, 0, 100, 100_000, 256, (Ack(ME, 1, 100),)), now=0.1)
print("estimates", [rank.tokens for rank in ranks], "tokens,", [rank.requests for rank in ranks], "requests")
