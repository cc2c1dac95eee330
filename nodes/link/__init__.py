"""A rank's link to controllers, clients, the bus and other ranks. It can be imported without torch and our scheduler.

An engine with a scheduler of its own embeds `RankLink`. `Runner` is the interface under it, for engines that run on the
link's own loop (`Host`); ours is `nodes.own.runner`.
"""

from nodes.link.actions import Cancel, Release, Start
from nodes.link.embed import Draining, RankLink
from nodes.link.leg import Leg
from nodes.link.runner import KvHandle, RankFacts, Runner

__all__ = [
    "Cancel",
    "Draining",
    "KvHandle",
    "Leg",
    "RankFacts",
    "RankLink",
    "Release",
    "Runner",
    "Start",
]
