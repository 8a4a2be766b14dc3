"""One `LLM` in several threads, and in a process that was forked from the one that made it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoengine import LLM, SamplingParams
from tests.forks import IS_LINUX, run_forked

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_threads_take_turns() -> None:
    prompts = [f"def f{i}(" for i in range(12)]
    with LLM("demo", dtype="float32", device="cpu", num_kv_blocks=200, use_tqdm=False) as llm:

        def ask(i: int) -> str:
            if i % 3:
                return llm.generate(prompts[i], PARAMS, use_tqdm=False)[0].outputs[0].text
            return "".join(llm.stream(prompts[i], PARAMS))

        alone = [ask(i) for i in range(len(prompts))]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(3):
                assert list(threads.map(ask, range(len(prompts)))) == alone


FORK = """
import os, sys
from nanoengine import LLM, SamplingParams
from nanoengine.errors import EngineClosed

llm = LLM("demo", device="cpu", num_kv_blocks=200, use_tqdm=False)
params = SamplingParams(temperature=0, max_tokens=4)
before = llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].text
child = os.fork()
if child == 0:
    for use in (lambda: llm.generate("def f(", params), lambda: list(llm.stream("def f(")), llm.reset_prefix_cache):
        try:
            use()
        except EngineClosed as error:
            print(f"fork of it: {'was made in process' in str(error)}", flush=True)
    llm.close()
    for sys.stderr in (None, open(os.devnull, "w")):  # as under pythonw, and of a service
        if sys.stderr is not None:
            sys.stderr.close()
        with LLM("demo", device="cpu", num_kv_blocks=200) as own:
            print("own:", own.generate("def f(", params)[0].outputs[0].text == before, flush=True)
            chosen = SamplingParams(temperature=0, max_tokens=4, structured_outputs={"choice": ["yes"]})
            print("own:", own.generate("def f(", chosen)[0].outputs[0].text == "yes", flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].text == before
print("parent goes on")
"""


@pytest.mark.skipif(not IS_LINUX, reason="Python is forked on Linux alone")
def test_a_fork_is_told_that_it_has_no_engine_and_may_make_one() -> None:
    done = run_forked(["-c", FORK])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["fork of it: True"] * 3 + ["own: True"] * 4 + ["parent goes on"]
