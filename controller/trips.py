"""The trips of a pair: the rank that computes its prompt, and what of the KV cache moves. Owns their names."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Trip: TypeAlias = Literal["at_decode", "delta", "read_back", "whole"]
"""`at_decode`: the decode rank computes the prompt, and nothing moves. The others have it computed by a prefill rank.
`delta`: the decode rank fetches what it lacks. `read_back`: so it does, but before, the prefill rank has read what the
decode rank has of the prompt and it lacks itself. `whole`: the decode rank has nothing of the prompt, and fetches
all."""
TRIPS: tuple[Trip, ...] = get_args(Trip)
"""The names of the trips."""
