"""Groups whose ranks are engines of this process: each computes in a thread of its own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from nanoengine import LLM, builder
from nanoengine import llm as llm_module
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.model_runner import ModelRunner
from nanoengine.worker.member import Member
from nanoengine.worker.process import config_of
from tests.support import fill_kv_with_nan, model_runner

SECONDS = 60.0
T = TypeVar("T")


@contextmanager
def open_group(size: int, folder: Path, opener: Callable[[], Any] | None = None, **options: Any) -> Iterator[list[LLM]]:
    """The ranks of a group, whose pools are full of NaN."""
    with ExitStack() as stack:
        memory = os.memfd_create("group")
        stack.callback(os.close, memory)
        ranks = []
        for rank in range(size):
            with as_member(Member(rank, size, memory, SECONDS)):
                given = {"device": "cpu", "use_tqdm": False, "enforce_eager": True} | options
                llm = LLM(str(folder), tensor_parallel_size=size, **given)
            ranks.append(stack.enter_context(llm))
            fill_kv_with_nan(llm)
        yield ranks


@contextmanager
def as_member(member: Member) -> Iterator[None]:
    """Engines that are opened meanwhile are those of this rank."""

    def read_config(*given: Any) -> Any:
        return config_of(builder.read_config(*given), member)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "read_config", read_config)
        yield


def by_all(ranks: Sequence[LLM], work: Callable[[LLM], T]) -> list[T]:
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
            return runner.launch(pickle.loads(message)).result()

        pairs = zip(self._threads, self._runners, strict=True)
        return self.Launched([thread.submit(carry_out, runner) for thread, runner in pairs])

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    class Launched(NamedTuple):
        steps: list[Any]

        def result(self) -> StepResult:
            results = [step.result() for step in self.steps]
            assert all(own.token_ids == results[0].token_ids for own in results)
            found: StepResult = results[0]
            return found


def let_group_compute(ranks: Sequence[LLM]) -> LLM:
    """The engine of the first rank, whose steps all ranks compute."""
    executor = ranks[0].engine.executor
    executor.executor = GroupInThreads(ranks)  # type: ignore[attr-defined]
    return ranks[0]
