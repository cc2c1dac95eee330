"""An engine that `--engine` knows once its package is installed: a toy that says the prompt again, in capitals.

After "pip install ./examples/toy_engine" the options --unified 1 --engine toy --model toy start a cluster of it with
"up"; the engine's own arguments follow a --. Asked for "hello", raw, it says HELLO. The entry point `toy` in
pyproject.toml names TOY. Without a package, from within a scheduler: see embed_rank.py.
"""

from contextlib import contextmanager

from bus.wire.messages import Load
from nodes.engines import EngineKind, Opened
from nodes.link.runner import Finished, Output, RankFacts


class Toy:
    """The runner of one rank: all methods are called on the node's thread, and none of them may block."""

    def __init__(self, model: str) -> None:
        self.facts = RankFacts(model=model, max_context=8192, vocab_size=259)
        self.steps = 0
        self.legs: list = []

    def attach(self, tell) -> None:
        self.tell = tell

    def start(self, leg) -> None:
        self.legs.append(leg)

    def cancel(self, leg) -> None:
        if leg in self.legs:
            self.legs.remove(leg)

    def release(self, leg) -> None:
        """For prefill ranks: a KV cache that was held is not needed any more."""

    @property
    def busy(self) -> bool:
        return bool(self.legs)

    def load(self) -> Load:
        waiting = sum(leg.prompt_tokens for leg in self.legs)
        return Load(
            seq=0, step=self.steps, running=len(self.legs), waiting=0, waiting_tokens=waiting, kv_tokens=0,
            kv_capacity=0, max_running=0,
        )  # fmt: skip

    def turn(self, now: float) -> None:
        """One forward step, which here is a whole answer of each request."""
        legs, self.legs = self.legs, []
        self.steps += bool(legs)
        for leg in legs:
            said = [token - 32 if 3 + ord("a") <= token <= 3 + ord("z") else token for token in leg.prompt]  # 3 + byte
            rest = said[: len(said) - leg.offset][leg.offset :][: leg.max_tokens]  # of a resumed one, what is left
            self.tell(Output(leg, tuple(rest or said[-1:])))
            self.tell(Finished(leg, "stop"))

    def tick(self, now: float) -> None:
        """For what is due by time."""

    def close(self) -> None:
        """For threads and processes of its own."""


def settings(options, arguments) -> str:
    """`NodeConfig.engine`, whatever the engine wants there; here the model's name and no arguments."""
    return options["model"]


@contextmanager
def opened(config, loop, progress):
    progress("loading", 1.0)
    yield Opened([Toy(config.engine) for _ in config.dp_ranks], step_tokens=8192)


TOY = EngineKind(settings=settings, opened=opened, takes_arguments=True, needs_model=True)
