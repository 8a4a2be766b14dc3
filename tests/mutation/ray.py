"""Mutants of what Ray is told; those that only a cluster would notice are not here."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

ROOM = "nanoengine/scale/ray/room.py"
TEST_ROOM = "tests/scale/ray/test_room.py"

MUTANTS = (
    Mutant(
        "a-node-s-cpus-are-given-twice",
        ROOM,
        "math.ceil(count / len(sizes))",
        "max(1, count // len(sizes))",
        "Three replicas on two nodes have a whole node each: one finds no room.",
        (TEST_ROOM,),
    ),
    Mutant(
        "ranks-have-one-gpu",
        ROOM,
        "num_gpus = num_ranks if",
        "num_gpus = 1 if",
        "All ranks of a replica find one GPU.",
        (TEST_ROOM,),
    ),
)
