"""Mutants of scaling, and of what Ray is told; those that only a cluster would notice are not here."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

SCALING = "nanoengine/replicas/scaling.py"
SUPERVISOR = "nanoengine/replicas/supervisor.py"
FLEET = "nanoengine/replicas/fleet.py"
ROOM = "nanoengine/ray/room.py"
BATCH = "nanoengine/ray/batch.py"
TEST_SCALING = "tests/replicas/test_scaling.py"
TEST_ROOM = "tests/ray/test_room.py"
TEST_BATCH = "tests/ray/test_batch.py"

MUTANTS = (
    Mutant(
        "scaling-does-not-wait",
        SCALING,
        "        if change != self._change:\n",
        "        if self._since is None:\n",
        "A gap in the load does not begin the wait anew.",
        (TEST_SCALING,),
    ),
    Mutant(
        "scaling-down-leaves-too-few",
        SCALING,
        "2 * num_reserved <= self.tokens * (count - 1)",
        "num_reserved <= self.tokens * count",
        "A replica is taken away that is missed at once.",
        (TEST_SCALING,),
    ),
    Mutant(
        "a-slot-that-is-taken-away-keeps-its-requests",
        SUPERVISOR,
        "drain(slot.current.key)\n            self._dismiss(slot.current",
        "num_running(slot.current.key)\n            self._dismiss(slot.current",
        "The replica ends, and is still sent requests.",
        (TEST_SCALING,),
    ),
    Mutant(
        "homeless-requests-do-not-wait",
        FLEET,
        "        return waiting + homeless, ",
        "        return waiting, ",
        "Requests without a replica start none.",
        (TEST_SCALING,),
    ),
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
