"""The load table alone, in a data-parallel controller of one's own: no process, thread or socket of pdbus.

Ranks report their load whenever they like, over whatever one has, and say how much they had taken in by then. The table
adds what is still on its way to them, so that each request counts exactly once and none is forgotten.
"""

from bus.wire.messages import Ack, Hello, Load
from controller import LoadTable
from controller.load.groups import Metric

ME = 1  # names this start of the controller in acknowledgements
table = LoadTable(ME)


def facts(n: int) -> Hello:
    """Who rank `n` is, and what it can hold."""
    return Hello(
        instance="engine", dp_rank=n, epoch=1, role="unified", model="m", dp_size=4, state="ready", endpoint="",
        max_context=8192, kv_capacity=100_000, max_running=256, block_tokens=16,
    )  # fmt: skip


def load(seq: int, running: int = 0, kv_tokens: int = 0, acks: tuple[Ack, ...] = ()) -> Load:
    """What a rank says of itself; `seq` rises with each report."""
    return Load(
        seq=seq, step=0, running=running, waiting=0, waiting_tokens=0, kv_tokens=kv_tokens, kv_capacity=100_000,
        max_running=256, acks=acks,
    )  # fmt: skip


ranks = [table.open(facts(n)) for n in range(4)]
for rank in ranks:
    table.apply(rank.key, 1, load(seq=1), now=0.0)  # its first report: idle
    table.set_ready(rank, True)
group = table.group("unified")


def dispatch(tokens: int) -> int:
    rank = group.least(Metric.TOKENS)
    assert rank is not None, "every rank is full: let the request wait"
    table.charge(rank, tokens)  # its estimate rises at once
    return rank.key[1]


print("to ranks", [dispatch(tokens) for tokens in (4000, 300, 200, 100, 100, 100)])
# rank 3 says: one request runs, with 100 tokens of KV cache, and that one is all that I had taken in from you
table.apply(ranks[3].key, 1, load(seq=2, running=1, kv_tokens=100, acks=(Ack(ME, 1, 100),)), now=0.1)
print("estimates", [rank.tokens for rank in ranks], "tokens,", [rank.requests for rank in ranks], "requests")
