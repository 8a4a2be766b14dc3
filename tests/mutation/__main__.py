"""Make mistakes in the code on purpose, and see whether the tests notice them.

`python -m tests.mutation [names...] [--room ROOM] [--jobs 1]`, from the root of a checkout. Each mutant is applied to a copy of the
checkout, and its tests run there. The status is 0 if all mutants are caught, those apart that are known to survive.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from tests.mutation.mutant import Mutant
from tests.mutation.rooms import ROOMS

MOST_SECONDS = 600
"""Tests that take longer hang, which counts as noticed."""


class Outcome(NamedTuple):
    """What became of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    STALE = "does not apply"
    NOT_RUN = "tests did not run"

    verdict: str
    seconds: float = 0.0
    detail: str = ""  # the test that failed, or why none ran


def copy_checkout(root: Path, to: Path) -> None:
    """Copy all files that git knows, or that are new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def run_tests(tree: Path, tests: Sequence[str], *, compiles: bool = False) -> Outcome:
    """Run tests in a copy up to the first that fails.

    Args:
        compiles: native kernels are compiled, which the user's cache is not to keep.
    """
    environment = (
        os.environ | {"PYTHONPATH": str(tree)} | ({"XDG_CACHE_HOME": str(tree / ".cache")} if compiles else {})
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *tests,
    ]
    start = perf_counter()
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(Outcome.CAUGHT, perf_counter() - start, f"no end after {MOST_SECONDS} s")
    seconds = perf_counter() - start
    if done.returncode == 0:
        return Outcome(Outcome.SURVIVED, seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    detail = failed[1] if failed else (done.stdout + done.stderr)[-300:]
    has_run = done.returncode == 1 or done.returncode < 0  # a test failed, or Python crashed in one
    return Outcome(Outcome.CAUGHT if has_run else Outcome.NOT_RUN, seconds, detail)


def run_mutant(tree: Path, mutant: Mutant, number: int) -> Outcome:
    """Apply a mutant to a copy, run its tests, and put the file back.

    Args:
        number: of the mutant, from 1. It is the time of the changed file, by which Python sees that compiled code is out of date.
    """
    path = tree / mutant.file
    original, times = path.read_text(), path.stat()
    changed = mutant.apply(original)
    if changed is None:
        return Outcome(Outcome.STALE, detail=mutant.file)
    try:
        path.write_text(changed)
        os.utime(path, (number, number))
        return run_tests(tree, mutant.tests, compiles=path.suffix in (".cpp", ".h"))
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


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
    trees: SimpleQueue[Path] = SimpleQueue()
    numbers, verdicts = count(1), Counter[str]()

    def run(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return run_mutant(tree, mutant, next(numbers))
        finally:
            trees.put(tree)

    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            copy_checkout(Path.cwd(), Path(folder) / str(job))
            trees.put(Path(folder) / str(job))
        unchanged = run_tests(Path(folder) / "0", sorted({test for mutant in mutants for test in mutant.tests}))
        if unchanged.verdict != Outcome.SURVIVED:
            parser.error(f"the tests fail without any mutant: {unchanged.detail}")
        for mutant, outcome in zip(mutants, pool.map(run, mutants), strict=True):
            is_known = outcome.verdict == Outcome.SURVIVED and mutant.survives
            verdict = "survived, as known" if is_known else outcome.verdict
            verdicts[verdict] += 1
            print(f"{verdict:<18} {outcome.seconds:6.1f} s  {mutant.name}  {outcome.detail}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()))
    return 0 if set(verdicts) <= {Outcome.CAUGHT, "survived, as known"} else 1


if __name__ == "__main__":
    sys.exit(main())
