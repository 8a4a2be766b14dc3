"""An observed engine whose clock passes only in steps and where a test says so."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan
from nanoengine.core.seams import KVLayout
from nanoengine.core.sequence import Request
from nanoengine.features.observability.metrics import EngineMetrics, RequestTimes
from nanoengine.features.observability.observer import Observer
from nanoengine.features.sampling.params import SamplingParams
from tests.core.toys import Done, ToyModel, make_engine

BLOCK_SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowModel(ToyModel):
    """Each step takes a quarter of a second."""

    def __init__(self, **options: Any):
        super().__init__(BLOCK_SIZE, **options)
        self.clock: Clock | None = None

    def launch(self, plan: StepPlan) -> Done:
        if self.clock is not None and plan.epoch > self.failed_epoch:
            self.clock.now += 0.25
        return super().launch(plan)


class Observed:
    """An engine and what observes it."""

    def __init__(
        self,
        *,
        model: ToyModel | None = None,
        num_blocks: int = 400,
        max_model_len: int = 60,
        enable_prefix_caching: bool = True,
        num_groups: int = 1,
        parts: Seq[Any] = (),
        blocks_of_longest: int | None = None,
        **options: Any,
    ):
        self.clock = Clock()
        self.model = SlowModel() if model is None else model
        if isinstance(self.model, SlowModel):
            self.model.clock = self.clock
        self.sources: dict[str, Any] = {}
        self.observer = Observer(
            max_model_len,
            blocks_of_longest or num_groups * -(-max_model_len // BLOCK_SIZE),
            enable_prefix_caching=enable_prefix_caching,
            sources=self.sources,
            clock=self.clock,
        )
        layouts = [KVLayout() for _ in range(num_groups)]
        self.model.layouts = layouts
        blocks = BlockManager(
            num_blocks, BLOCK_SIZE, layouts, [self.observer.events], enable_prefix_caching=enable_prefix_caching
        )
        self.engine: LLMEngine = make_engine(
            model=self.model,
            blocks=blocks,
            max_model_len=max_model_len,
            parts=[*parts, self.observer],
            **options,
        )

    def add(
        self, prompt: list[int], max_tokens: int | None = 5, request_id: str | None = None, **params: Any
    ) -> Request:
        values = {"ignore_eos": True, "seed": 0} | params
        request = self.engine.make_request(prompt, SamplingParams(max_tokens=max_tokens, **values), request_id)
        self.engine.submit(request)
        return request

    def snapshot(self) -> EngineMetrics:
        return self.observer.snapshot(self.engine)

    @property
    def times(self) -> RequestTimes:
        return self.snapshot().times

    def check(self, **expected: tuple[int, float]) -> None:
        """How many values histograms have, and their sums."""
        times = self.times
        found = {name: getattr(times, name) for name in expected}
        assert {name: (own.count, own.sum) for name, own in found.items()} == expected
