"""Running the tests of a mutant in a copy of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Self

from tests.mutation.mutant import Mutant

CAUGHT, SURVIVED, STALE, NOT_RUN = "caught", "survived", "does not apply", "tests did not run"

MOST_SECONDS = 200
"""Of the tests of one mutant: if they take longer, they hang, which counts as caught."""

COMPILING = 600
"""Seconds more, where kernels are compiled for them."""


class Outcome(NamedTuple):
    """What became of a mutant, or of tests without one."""

    verdict: str
    seconds: float = 0.0
    detail: str = ""  # the test that failed, or why none ran


def copy_checkout(root: Path, to: Path) -> None:
    """Copy all files that git knows, or that are new and not ignored."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in listed.split("\0"):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


class Workplace:
    """A copy of a checkout, and a process that runs tests in it.

    Args:
        tree: the copy.
    """

    def __init__(self, tree: Path):
        self.tree = tree
        self._num_runs = 0
        command = [sys.executable, "-m", "tests.mutation.zygote"]
        root = Path(__file__).parent.parent.parent
        self._zygote = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._zygote:  # ends when it has nothing more to read
            pass

    def run_mutant(self, mutant: Mutant) -> Outcome:
        """Apply a mutant, run its tests, and put the file back."""
        path = self.tree / mutant.file
        original, times = path.read_text(), path.stat()
        changed = mutant.apply(original)
        if changed is None:
            return Outcome(STALE, detail=mutant.file)
        try:
            path.write_text(changed)
            # Python sees by a file's time and size that compiled code is out of date: no two mutants have the same time.
            os.utime(path, (self._num_runs + 1,) * 2)
            compiles = path.suffix in (".cpp", ".h")
            return self.run_tests(mutant.tests, most_seconds=MOST_SECONDS + COMPILING * compiles, compiles=compiles)
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run_tests(self, tests: Sequence[str], *, most_seconds: int = MOST_SECONDS, compiles: bool = False) -> Outcome:
        """Run tests up to the first that fails.

        Args:
            compiles: native kernels are compiled, which the user's cache is not to keep.
        """
        self._num_runs += 1
        log = self.tree / "pytest.log"
        environment = {"PYTHONPATH": str(self.tree)}
        if compiles:
            environment["XDG_CACHE_HOME"] = str(self.tree / ".cache")
        arguments = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        start = perf_counter()
        order = str(self.tree), str(log), most_seconds, environment, arguments
        print(json.dumps(order), file=self._zygote.stdin, flush=True)
        status = int(self._zygote.stdout.readline())
        seconds, output = perf_counter() - start, log.read_text(errors="replace")
        if status == 0:
            return Outcome(SURVIVED, seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if status < 0:
            return Outcome(CAUGHT, seconds, f"signal {-status}")  # Python crashed, or the run hung
        return Outcome(CAUGHT if status == 1 else NOT_RUN, seconds, failed[1] if failed else output[-300:])
