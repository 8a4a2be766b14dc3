"""Groups whose ranks are engines of this process: each computes in a thread of its own."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from nanoengine import LLM
from nanoengine import llm as llm_module
from nanoengine.builder import read_config
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import ModelRunner
from nanoengine.scale.worker.member import Member, RankLost
from nanoengine.scale.worker.process import config_of
from tests.support import fill_kv_with_nan, model_runner

SECONDS = 20.0
S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def open_group(size: int, folder: Path, **options: Any) -> Iterator[list[LLM]]:
    """The ranks of a group, whose pools are full of NaN. They start at the same time: some measure steps, which all compute."""
    given = {
        "device": "cpu",
        "use_tqdm": False,
        "enforce_eager": True,
        "tensor_parallel_size": size,
        "replicas": 0,
    } | options
    memory, members = os.memfd_create("group"), threading.local()

    def read_own_config(*model_and_options: Any) -> Any:
        return config_of(read_config(*model_and_options), members.own)

    def open_rank(rank: int) -> LLM:
        members.own = Member(rank, size, memory, SECONDS)
        return LLM(str(folder), **given)

    with ExitStack() as stack:
        stack.callback(os.close, memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm_module, "read_config", read_own_config)
            ranks = by_all(range(size), open_rank)
        for llm in ranks:
            stack.enter_context(llm)
            fill_kv_with_nan(llm)
        yield ranks


def by_all(ranks: Sequence[S], work: Callable[[S], T]) -> list[T]:
    """What each rank makes of some work, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


class GroupInThreads:
    """An executor: plans go to all ranks as bytes, and the result is that of the first."""

    def __init__(self, ranks: Sequence[LLM]):
        self._runners: list[ModelRunner] = [model_runner(llm) for llm in ranks]
        self._threads = [ThreadPoolExecutor(1) for _ in ranks]

    def launch(self, plan: StepPlan) -> GroupInThreads.Launched:
        message = pickle.dumps(plan)

        def carry_out(runner: ModelRunner) -> StepResult:
            return runner.launch(pickle.loads(message))()

        pairs = zip(self._threads, self._runners, strict=True)
        return self.Launched([thread.submit(carry_out, runner) for thread, runner in pairs])

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    class Launched(NamedTuple):
        steps: list[Any]

        def __call__(self) -> StepResult:
            errors = [error for step in self.steps if (error := step.exception()) is not None]
            if errors:  # what went wrong first, if others waited in vain
                raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
            results = [step.result() for step in self.steps]
            assert all(own.token_ids == results[0].token_ids for own in results)
            found: StepResult = results[0]
            return found


def let_group_compute(ranks: Sequence[LLM]) -> LLM:
    """The engine of the first rank, whose steps all ranks compute."""
    executor = ranks[0].engine.executor
    executor.executor = GroupInThreads(ranks)  # type: ignore[attr-defined]
    return ranks[0]
