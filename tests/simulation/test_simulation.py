"""Trials that broke once: what held must go on to hold."""

from __future__ import annotations

import re

import cuts
import pytest

from simulation.apart import run
from simulation.drawn import DRAWN
from simulation.mutation import Mutation
from simulation.mutations import MUTATIONS
from simulation.run import trial
from simulation.spec import draw
from simulation.story import message_in

# Each broke before a repair, the first four when worlds were drawn without troubles: a process of eight ranks starts
# again; one rid at two controllers; the answer to one's own cancel; a law that took ranks to avoid for free ones. Then:
# attempts that a controller made unasked; the prefill leg of an attempt that was given up; a cancel of what has ended.
# In small worlds: a client that was paused for ten seconds; an attempt that another rank of its process had; a fault
# after all was over. In tight ones: a request after all was over; a rank that does not hear its controller, taken for
# dead each second; a law that knew of one flapping end. In crowded ones: a cancel, then an attach, that no queue took;
# a law in haste. With guests: tries that were forgotten when another's request had the rid. In pairs: a cancel that was
# lost with its connection. Again: a law that knew of no full rank; the end of a former request of the rid; a decode leg
# that waited three times for a prefill leg whose end its client had not heard; a law that forgot a cancel which came
# while a rank was paused; a watch that was asked for again before its answer came; and more of the same.
BROKE = {"--plain": (5, 12, 20781088, 20781124),
         "": (4, 450, 55, 701574, 702428, 703233, 703303, 704171, 712781, 713026, 727936, 729049,
              729695, 737887, 741207, 742631, 756839),
         "--small": (60, 600010, 600141), "--tight": (27, 700525, 701022, 702982, 737344),
         "--crowded": (91, 759553, 700862, 701415, 701919, 702115, 703697), "--tries": (701395, 711083),
         "--guests": (700978, 702021, 702931, 727095, 740670, 743998, 745134, 749670, 751174),
         "--pairs": (702649, 731955, 760021),
         "--killers": (42, 90, 743420, 745172, 746388, 749572, 755396, 756668)}  # fmt: skip


FORMER_TRIES = """
from simulation.run import trial
from simulation.spec import draw
world, error = trial(draw(51))
pairs = [asked.result for asked in world.asked if asked.result and asked.spec.prefill_controller >= 0]
print(error, len(pairs), max(result.attempts for result in pairs))
"""


def ran(*command: str) -> str:
    code, said = run(*command)
    assert code == 0, said
    return said


@pytest.mark.parametrize("seeds", [f"{seed} {how}" for how, each in BROKE.items() for seed in each])
def test_what_must_hold_holds(seeds: str) -> None:
    said = ran("-m", "simulation.run", *seeds.split(), "--first")
    assert re.search(
        r"\b(ok|cancelled|deadline|engine_failed|poison) [1-9]", said
    )  # in one world no rank is there for long


def test_conversations_at_ranks_that_keep_caches_hold() -> None:
    said = ran("-m", "simulation.run", "1:4", "--cached", "--first")
    assert re.search(r"\bok [1-9]", said)


def test_the_end_of_a_former_try_uses_up_none_of_the_next() -> None:
    """M94: pairs at two controllers, whose prefill legs wait while their decode legs are at a rank already."""
    *error, pairs, attempts = ran("-c", FORMER_TRIES).split()
    assert error == ["None"]
    assert int(pairs) > 20
    assert int(attempts) <= 4  # 19 before, the last of which failed


def test_the_same_seed_is_the_same_trial_to_the_last_message() -> None:
    stories = []
    for _ in range(2):
        story: list[tuple[float, str]] = []
        trial(draw(7), lambda world, pipe, frames, story=story: story.append((world.now, message_in(frames)[0])))  # type: ignore[misc]
        stories.append(story)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 1000


@pytest.mark.parametrize("mutation", [*MUTATIONS, *DRAWN], ids=lambda mutation: mutation.name)
def test_a_defect_put_back_fits_the_source(mutation: Mutation) -> None:
    source = (cuts.ROOT / f"{mutation.symbol.partition(':')[0].replace('.', '/')}.py").read_text()
    compile(cuts.cut_hook.patched(source, mutation.symbol, mutation.old, mutation.new), mutation.symbol, "exec")
