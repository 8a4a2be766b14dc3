"""Make mistakes in the code on purpose, and see whether the tests notice them.

`python -m tests.mutation [names...] [--room ROOM] [--jobs 1]`, from the root of a checkout. Each mutant is applied to a copy of
it, and its tests run there. The status is 0 if all mutants are caught, but for those that are known to survive.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutation.mutant import Mutant
from tests.mutation.rooms import ROOMS
from tests.mutation.running import CAUGHT, SURVIVED, Outcome, Workplace, copy_checkout

AS_KNOWN = "survived, as known"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; without any, all of them")
    parser.add_argument("--room", choices=ROOMS, help="only those of one part of the engine")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are worked in at once")
    args = parser.parse_args()
    mutants = [m for room, all_of in ROOMS.items() if args.room in (None, room) for m in all_of]
    if unknown := set(args.names) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in mutants if not args.names or mutant.name in args.names]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mutants-")))
        workplaces = []
        for job in range(args.jobs):
            copy_checkout(Path.cwd(), folder / str(job))
            workplaces.append(stack.enter_context(Workplace(folder / str(job))))
        return run_all(mutants, workplaces)


def run_all(mutants: Sequence[Mutant], workplaces: Sequence[Workplace]) -> int:
    """Run mutants, print what becomes of them, and return the exit status."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    unchanged = workplaces[0].run_tests(tests, most_seconds=3600)
    if unchanged.verdict != SURVIVED:
        print(f"tests fail without any mutant: {unchanged.detail}")
        return 1
    print(f"all tests pass without a mutant, in {unchanged.seconds:.0f} s", flush=True)
    free: SimpleQueue[Workplace] = SimpleQueue()
    for workplace in workplaces:
        free.put(workplace)

    def run(mutant: Mutant) -> Outcome:
        workplace = free.get()
        try:
            return workplace.run_mutant(mutant)
        finally:
            free.put(workplace)

    verdicts: Counter[str] = Counter()
    with ThreadPoolExecutor(len(workplaces)) as pool:
        for mutant, outcome in zip(mutants, pool.map(run, mutants), strict=True):
            verdict = AS_KNOWN if outcome.verdict == SURVIVED and mutant.survives else outcome.verdict
            verdicts[verdict] += 1
            print(f"{verdict:<18} {outcome.seconds:6.1f} s  {mutant.name}  {outcome.detail}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()))
    return 0 if verdicts.keys() <= {CAUGHT, AS_KNOWN} else 1


if __name__ == "__main__":
    sys.exit(main())
