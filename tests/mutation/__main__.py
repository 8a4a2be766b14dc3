"""Make mistakes in the code on purpose, and see whether the tests notice them.

`python -m tests.mutation [names...] [--room ROOM]`, from the root of a checkout. Each mutant is applied to a copy of
it, and its tests run there. The status is 0 if all mutants are caught, but for those that are known to survive.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutation.mutant import Mutant, read_mutants
from tests.mutation.running import CAUGHT, SURVIVED, Workplace, copy_checkout

AS_KNOWN = "survived, as known"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; without any, all of them")
    rooms = read_mutants()
    parser.add_argument("--room", choices=rooms, help="only those of one part of the engine")
    parser.add_argument("--trust", action="store_true", help="do not run all these tests without a mutant first")
    args = parser.parse_args()
    mutants = [m for room, all_of in rooms.items() if args.room in (None, room) for m in all_of]
    if unknown := set(args.names) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in mutants if not args.names or mutant.name in args.names]
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy_checkout(Path.cwd(), Path(folder))
        with Workplace(Path(folder)) as workplace:
            return 0 if (args.trust or pass_unchanged(mutants, workplace)) and run_all(mutants, workplace) else 1


def pass_unchanged(mutants: Sequence[Mutant], workplace: Workplace) -> bool:
    """Whether all tests pass without any mutant: otherwise they would seem to catch all."""
    unchanged = workplace.run_tests(sorted({test for mutant in mutants for test in mutant.tests}), most_seconds=3600)
    passed = unchanged.verdict == SURVIVED
    print(
        f"without a mutant, tests {'pass' if passed else 'fail'}  {unchanged.seconds:.1f} s  {unchanged.detail}",
        flush=True,
    )
    return passed


def run_all(mutants: Sequence[Mutant], workplace: Workplace) -> bool:
    """Run mutants, and print what becomes of them. Returns whether all were caught, or were known to survive."""
    verdicts: Counter[str] = Counter()
    for mutant in mutants:
        outcome = workplace.run_mutant(mutant)
        verdict = AS_KNOWN if outcome.verdict == SURVIVED and mutant.survives else outcome.verdict
        verdicts[verdict] += 1
        print(f"{verdict:<18} {outcome.seconds:6.1f} s  {mutant.name}  {outcome.detail}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()))
    return verdicts.keys() <= {CAUGHT, AS_KNOWN}


if __name__ == "__main__":
    sys.exit(main())
