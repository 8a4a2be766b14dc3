"""Mutants of the worker process."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

RUNNER = "nanoengine/worker/remote_runner.py"
CAPABILITY = "nanoengine/worker/capability.py"
PROCESS = "nanoengine/worker/process.py"
TEST = "tests/worker/test_worker.py"

MUTANTS = (
    Mutant(
        "a-new-worker-is-thought-to-have-the-blocks",
        CAPABILITY,
        "            engine.scheduler.blocks.reset()\n",
        "",
        "Prefixes that the lost worker had are found in the pool of the new one.",
        (TEST,),
    ),
    Mutant(
        "old-answers-are-taken",
        RUNNER,
        "if found == number:",
        "if found <= number:",
        "An answer to a plan that nobody waited for is taken for that of a later one.",
        (TEST,),
    ),
    Mutant(
        "nobody-is-ever-to-blame",
        RUNNER,
        "        self._num_losses += 1\n",
        "        self._num_losses = 1\n",
        "A request that kills every worker is tried for ever.",
        (TEST,),
    ),
    Mutant(
        "a-worker-outlives-its-parent",
        PROCESS,
        "        os._exit(0)  # in the middle of a step, too: nobody waits for it\n",
        "        pass\n",
        "A worker whose parent was killed stays.",
        (TEST,),
    ),
)
