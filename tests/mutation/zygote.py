"""A process that forks for each run of pytest. It has imported large packages before, which takes longer than most tests.

Its arguments are the names of these packages.

It reads a line of JSON for each run: [folder, log file, most seconds, variables of the environment, arguments of pytest]. Its
answer is the exit status, or a number below 0 if a signal has ended the run, as one does after so many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",
}
"""As in tests/conftest.py, which is imported too late for that. No mutant needs a GPU."""

PROFILE = "mutants"


def serve() -> None:
    os.environ |= ENVIRONMENT
    for name in sys.argv[1:]:
        import_module(name)
    from hypothesis import Phase, settings

    # The same cases as in the suite; one that fails is not made smaller, which takes long.
    settings.register_profile(PROFILE, derandomize=True, phases=(Phase.explicit, Phase.generate))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(folder: str, log: str, most_seconds: int, environment: dict[str, str], arguments: list[str]) -> NoReturn:
    signal.alarm(most_seconds)
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, flags, 0o600), target)
    os.dup2(1, 2)
    os.environ |= environment
    os.chdir(folder)
    sys.path[0] = folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the folder has its own
    import pytest

    status = int(pytest.main([*arguments, f"--hypothesis-profile={PROFILE}"]))
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
