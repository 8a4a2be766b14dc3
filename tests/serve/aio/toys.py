"""Engines for the tests of streams: a gate before their steps, and an executor that says a text."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.features.sampling.params import SamplingParams
from tests.core.toys import Done, ToyModel, check, make_engine, run

EOS = 0
POISON = 49

PATIENCE = 30.0
"""Seconds after which a test that waits is wrong; right ones wait for as long as the other thread takes."""


class StepGate:
    """Holds the steps of an engine that another thread runs. It is open at first.

    Args:
        engine: nothing else changes its `step`.
    """

    def __init__(self, engine: LLMEngine):
        self.num_steps = 0  # that were taken
        self.error: BaseException | None = None  # what the next step raises
        self._engine, self._step = engine, engine.step
        self._permits: int | None = None  # None: all
        self._num_waiting = 0
        self._changed = threading.Condition()
        engine.step = self._gated_step  # type: ignore[method-assign]

    def shut(self) -> None:
        with self._changed:
            self._permits = 0

    def let(self, count: int = 1) -> None:
        """Let so many more steps be taken."""
        with self._changed:
            assert self._permits is not None, "it is open"
            self._permits += count
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Wait until the engine stands before a step that it may not take."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_waiting > 0 and self._permits == 0, PATIENCE)

    def _gated_step(self) -> list[Request]:
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits is None or self._permits > 0, PATIENCE)
            self._num_waiting -= 1
            if self._permits is not None:
                self._permits -= 1
        if self.error is not None:
            raise self.error
        touched = self._step()
        self.num_steps += 1
        check(self._engine.scheduler)
        return touched


class Script:
    """An executor that says the same text to every sequence, byte by byte, and then end of text."""

    def __init__(self, text: str):
        self.bytes = text.encode()
        self.num_said: dict[int, int] = {}  # of each row

    def launch(self, plan: StepPlan) -> Done:
        for start in plan.started:
            self.num_said[start.row] = len(start.token_ids) - start.sampling.num_prompt_tokens
        rows = [*plan.decode_rows.tolist(), *(one.row for one in plan.runs if one.samples)]
        return Done(StepResult([self._say(row) for row in rows]))

    def _say(self, row: int) -> int:
        said = self.num_said[row]
        self.num_said[row] += 1
        return self.bytes[said] if said < len(self.bytes) else EOS

    def close(self) -> None: ...


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


class LogprobListener(PolicyPart):
    """Gives every token a log probability: minus the token itself."""

    def submitted(self, request: Request) -> None:
        for seq in request.sequences:
            seq.logprobs = []

    def after_step(self, step: object, result: object, seqs: list[Any]) -> None:
        for seq in seqs:
            seq.logprobs += [-token for token in seq.output_token_ids[len(seq.logprobs) :]]


class ShowingParams(SamplingParams):
    """Params that ask for log probabilities."""

    def returned_logprobs(self, logprobs: list[Any] | None, tokens: list[int]) -> tuple[list[Any] | None, float | None]:
        if logprobs is None:
            return None, None
        return logprobs[: len(tokens)], sum(logprobs[: len(tokens)])


def script_engine(text: str, *, max_num_seqs: int = 8) -> LLMEngine:
    scheduler = Scheduler(
        BlockManager(64, 4), max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, parts=[LogprobListener()]
    )
    facts: dict[str, Any] = {"vocab_size": 256, "max_model_len": 100, "eos_token_ids": (EOS,)}
    return LLMEngine(scheduler, Script(text), ByteTokenizer(), **facts)


@cache
def expected(*prompt: int, max_tokens: int = 40) -> list[int]:
    """What a request with seed 0 gets, whatever else runs."""
    engine = make_engine()
    request = engine.make_request(list(prompt), greedy(max_tokens))
    run(engine, [request])
    return request.output().outputs[0].token_ids


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **params)


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left: no sequence, no block in use, no request."""
    check(engine.scheduler)
    assert not engine.has_unfinished
    assert engine.requests == {}
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


class Poisoned(ToyModel):
    """A plan that starts a prompt with the token POISON fails."""

    def launch(self, plan: StepPlan) -> Done:
        if plan.epoch > self.failed_epoch and any(POISON in start.token_ids for start in plan.started):
            self.failing.add(self.num_launched + 1)
        return super().launch(plan)
