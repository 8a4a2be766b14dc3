"""Mutants of the worker process."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

RUNNER = "nanoengine/scale/worker/remote_runner.py"
CAPABILITY = "nanoengine/scale/worker/capability.py"
CHILD = "nanoengine/scale/worker/child.py"
LINK = "nanoengine/scale/worker/link.py"
TEST = "tests/scale/worker/test_worker.py"
OF_LOSSES = "tests/scale/worker/test_lost.py"

MUTANTS = (
    Mutant(
        "a-new-worker-is-thought-to-have-the-blocks",
        CAPABILITY,
        "        engine.scheduler.blocks.reset()\n",
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
        CHILD,
        "        os._exit(0)  # also in the middle of a step: nobody waits for its result\n",
        "        threading.Event().wait()\n",
        "A worker whose parent was killed stays.",
        (TEST,),
    ),
    Mutant(
        "a-worker-that-starts-and-is-stopped-is-waited-for",
        RUNNER,
        "if now >= at + limits.worker_silence_seconds:",
        "if False:",
        "One that is stopped while it starts is waited for as long as a large model may take to load.",
        (OF_LOSSES,),
    ),
    Mutant(
        "answers-may-come-in-any-order",
        RUNNER,
        "message[0] != due or",
        "",
        "An answer that is left out or comes twice makes all later ones those of other steps.",
        (OF_LOSSES,),
    ),
    Mutant(
        "a-start-that-fails-is-the-end",
        RUNNER,
        "        for number in range(most):\n",
        "        for number in range(1):\n",
        "A worker that is killed while it starts ends the engine.",
        (OF_LOSSES,),
    ),
    Mutant(
        "what-cannot-be-read-is-left-out",
        LINK,
        "                raise Unreadable(reason) from error\n",
        "                continue\n",
        "Who waits for that message waits in vain, or takes another for it.",
        ("tests/scale/worker/test_link.py",),
    ),
)
