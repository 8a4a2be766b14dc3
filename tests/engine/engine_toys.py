"""An engine around toys: a scripted executor, a clock that stands still, tokenizers for both."""

from __future__ import annotations

from typing import Any

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.request import Request
from nanoengine.outputs import RequestOutput, TokenLogprob
from tests.engine.toys import VOCAB_SIZE, ByteTokenizer, Eager, ToyModel, make_scheduler, sampled_rows

EOS = 0


class Script(Eager):
    """An executor that says the same text to every sequence, byte by byte, and then end of text."""

    def __init__(self, text: str = "hello", logprobs: bool = False):
        self.bytes = text.encode()
        self.logprobs = logprobs
        self.seeds: dict[int, int] = {}  # of the sequence in each row
        self.num_said: dict[int, int] = {}  # by the seed of a sequence
        self.plans: list[StepPlan] = []
        self.errors: list[BaseException | None] = []  # what the next steps raise
        self.closed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.seeds.update((start.row, start.sampling.seed) for start in plan.started)
        tokens = []
        for row in sampled_rows(plan):
            seed = self.seeds[row]
            said = self.num_said.get(seed, 0)
            self.num_said[seed] = said + 1
            tokens.append(self.bytes[said] if said < len(self.bytes) else EOS)
        entries = {i: {token: TokenLogprob(-0.5, 1)} for i, token in enumerate(tokens)} if self.logprobs else {}
        return StepResult(tokens, entries)

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class DigitTokenizer:
    """Decodes any token id."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in token_ids)


def make_engine(executor: Any = None, *, eos: tuple[int, ...] = (EOS,), seed: int = 0, **options: Any) -> LLMEngine:
    executor = Script() if executor is None else executor
    tokenizer, vocab_size = (DigitTokenizer(), VOCAB_SIZE) if isinstance(executor, ToyModel) else (ByteTokenizer(), 256)
    clock = options.pop("clock", Clock())
    depth = options.pop("max_steps_in_flight", 1)
    return LLMEngine(
        make_scheduler(**options),
        executor,
        tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        seed=seed,
        clock=clock,
        max_steps_in_flight=depth,
    )


def run(engine: LLMEngine, *requests: Request) -> list[RequestOutput]:
    """Step until nothing is left."""
    for _ in range(1000):
        if not engine.has_unfinished:
            assert_idle(engine)
            return [request.output() for request in requests]
        engine.step()
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left: no sequence, no block in use, no request that anyone holds on to."""
    engine.scheduler.check()
    assert not engine.has_unfinished
    assert engine.scheduler.block_manager.pool.usage == 0.0
    assert engine._requests == {}
    assert engine._owner == {}
