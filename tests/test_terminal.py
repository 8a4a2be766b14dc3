"""The process of the command, whatever its terminal does: one line at most, and no traceback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import IS_LINUX, run_forked

pytestmark = pytest.mark.skipif(os.name != "posix", reason="streams and signals are those of POSIX")

ROOT = Path(__file__).parent.parent
MODULE = ["-m", "nanoengine"]
GENERATE = [*MODULE, "generate", "--max-tokens", "3", "--dtype", "float32", "--temperature", "0"]
IN, OUT, ERR = range(3)

forked = pytest.mark.skipif(not IS_LINUX, reason="Python is forked on Linux alone")


def run(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell, with nothing on standard input unless it says otherwise."""
    return subprocess.run(
        ["sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        cwd=ROOT,
    )


def check_quiet(done: subprocess.CompletedProcess[str]) -> None:
    for noise in ("Traceback", "Exception ignored", "Logging error"):
        assert noise not in done.stdout + done.stderr


@forked
@pytest.mark.parametrize(
    ("arguments", "closed", "status", "told"),
    [
        ([*MODULE, "models"], [OUT], 0, ""),
        ([*MODULE, "demo", "--max-tokens", "2", "--dtype", "float32"], [OUT], 0, "demo: float32 on cpu"),
        ([*GENERATE, "a"], [ERR], 0, ""),
        ([*GENERATE, "--model", "nope"], [ERR], 1, ""),
        (GENERATE, [IN], 1, "InvalidPrompt: standard input has no text"),
        ([*MODULE, "chat", "demo"], [IN], 1, "InvalidPrompt: standard input has no text"),
        ([*GENERATE, "a", "b"], [IN, OUT, ERR], 0, ""),
    ],
)
def test_streams_may_be_closed(arguments: list[str], closed: list[int], status: int, told: str) -> None:
    done = run_forked(arguments, streams=dict.fromkeys(closed))
    check_quiet(done)
    assert done.returncode == status, done.stderr
    assert told in done.stderr


@forked
def test_standard_input_may_hold_no_text() -> None:
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = run_forked(GENERATE, given=b"\377\376", environment=strict)
    check_quiet(done)
    assert done.returncode == 1
    assert "InvalidPrompt: standard input is no text" in done.stderr


def test_streams_of_a_new_python_may_be_closed() -> None:
    """Which the forks of one that runs already stand for."""
    done = run(f"{shlex.join([sys.executable, *GENERATE])} a >&- 2>&- <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@forked
@pytest.mark.parametrize(
    "arguments", [[], ["models"], ["generate", "--max-tokens", "3", "a"], ["generate", "--max-tokens", "3", "a", "b"]]
)
def test_a_full_disk_is_told(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_forked([*MODULE, *arguments], streams={OUT: full.fileno()})
    check_quiet(done)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "nanoengine: OSError: [Errno 28] No space left on device"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it is Linux' own")
def test_a_log_that_is_full_keeps_nobody_from_answers() -> None:
    done = run(f"{shlex.join([sys.executable, *GENERATE])} a b 2>/dev/full")
    assert done.returncode == 0
    assert done.stdout.startswith("--- 'a' [0]")


@forked
def test_a_terminal_of_few_characters_gets_the_others_in_numbers() -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run_forked([*MODULE, "generate", "--max-tokens", "9", "--choice", "é", "a"], environment=ascii_only)
    check_quiet(done)
    assert (done.returncode, done.stdout) == (0, "\\xe9\n")


@pytest.mark.parametrize("arguments", ["generate --max-tokens 3 a", "serve --help"])
def test_python_may_run_without_docstrings_and_assertions(arguments: str) -> None:
    done = run(f"{shlex.quote(sys.executable)} -OO -m nanoengine {arguments}")
    check_quiet(done)
    assert done.returncode == 0, done.stderr


@forked
def test_a_log_has_one_line_and_all_there_is_to_know_is_shown_to_who_asks() -> None:
    (line,) = run_forked([*GENERATE, "a", "b"]).stderr.splitlines()
    assert line.startswith("nanoengine: demo: float32 on cpu, ")
    assert line.endswith("context 4096 tokens")
    first, second = run_forked([*GENERATE, "-v", "a", "b"]).stderr.splitlines()
    assert first == line
    assert all(word in second for word in ("Qwen3ForCausalLM", "KV pool: ", "MiB in "))


@forked
def test_without_a_compiler_torch_computes_and_one_line_says_so() -> None:
    done = run_forked([*GENERATE, "a"], environment=os.environ | {"CXX": "/nowhere/c++"})
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert "plain torch computes, which is slower: " in first
    assert "(/nowhere/c++)" in first
    assert "torch kernels" in second


LIMITED = (
    "import resource, sys; from nanoengine.__main__ import main; resource.setrlimit(resource.RLIMIT_AS, (3 << 30,) * 2)"
)


@forked
def test_a_limit_of_memory_makes_a_smaller_pool() -> None:
    generate = ["-c", f"{LIMITED}; sys.exit(main())", *GENERATE[2:]]
    done = run_forked([*generate, "a"])
    assert done.returncode == 0, done.stderr
    refused = run_forked([*generate, "--kv-cache-memory", "3GiB", "a"])
    check_quiet(refused)
    assert refused.returncode == 1
    assert "lower num_kv_blocks, kv_cache_memory" in refused.stderr


WAIT = """
import os, signal, sys, threading, time
from nanoengine import __main__
def press():
    for _ in range(20):
        time.sleep(0.003)
        os.kill(os.getpid(), signal.SIGINT)
threading.Timer(float(sys.argv[1]), press).start()
sys.argv[1:] = ["generate", "--max-tokens", "3000", "--dtype", "float32", "a"]
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("seconds", [0, 0.4, 1.2])
def test_ctrl_c_twenty_times_at_any_moment_ends_it(seconds: float) -> None:
    """Also while modules are imported, or the model is loaded: wherever the time falls on this machine."""
    done = subprocess.run(
        [sys.executable, "-c", WAIT, str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        # A shell that starts pytest in the background ignores SIGINT for it and its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    check_quiet(done)
    assert done.returncode in (130, -signal.SIGINT, 0), done.stderr
