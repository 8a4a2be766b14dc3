"""Mutants of what Ray is told; those that only a cluster would notice are not here."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

ROOM = "nanoengine/ray/room.py"
BATCH = "nanoengine/ray/batch.py"
TEST_ROOM = "tests/ray/test_room.py"
TEST_BATCH = "tests/ray/test_batch.py"

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
    Mutant(
        "a-row-s-seed-is-the-engine-s",
        BATCH,
        "        if seed is None and self.params.seed is None:\n",
        "        if False:\n",
        "A batch that is computed again has other outputs.",
        (TEST_BATCH,),
    ),
)
