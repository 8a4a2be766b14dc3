"""Ends of constrained requests, and what goes wrong in one."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.endings import answers
from nanoengine import LLM, SamplingParams
from nanoengine.core.config import POLICIES
from nanoengine.core.errors import NoTokenLeft
from nanoengine.core.messages import StepPlan
from nanoengine.errors import InvalidSamplingParams, StepFailed
from nanoengine.features.structured import constraint, mask_filling
from nanoengine.features.structured.constraint import Constraint
from nanoengine.features.structured.forced_drafts import ForcedDrafts
from nanoengine.features.structured.mask_filling import MASKS, GrammarPolicy, GrammarTooComplex, StepMasks
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.serve.server.errors import api_error_of
from tests.e2e.small_engine import Broken, assert_idle
from tests.features.structured.drawn import KINDS, SHARED, draw_requests
from tests.support import model_runner

YES = {"choice": ["yes", "no"]}
SMOLLM2 = DOWNLOADS["smollm2"].path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=200, num_kv_blocks=60, use_tqdm=False, device="cpu") as llm:
        yield llm


def part_of(llm: LLM) -> GrammarPolicy:
    [part] = (part for part in llm.engine.scheduler.parts if isinstance(part, GrammarPolicy))
    return part


def say(llm: LLM, **params: Any) -> Any:
    return llm.generate("def f", SamplingParams(seed=1, max_tokens=30, **params), use_tqdm=False)[0].outputs[0]


def test_the_end_of_a_grammar_is_the_end_even_if_ends_are_ignored(llm: LLM) -> None:
    plain, ignoring = say(llm, structured_outputs=YES), say(llm, structured_outputs=YES, ignore_eos=True)
    assert plain.text in YES["choice"]
    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert ignoring == plain


@pytest.mark.parametrize("kind", ["choice", "expression", "call"])
def test_answers_of_a_small_model_end_by_themselves(kind: str) -> None:
    """Where the grammar has an end, one comes, though free answers would go on otherwise behind it."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2.name} is not among the models that `nanoengine fetch` gets")
    with LLM(str(SMOLLM2), device="cpu", num_kv_blocks=200, max_model_len=512, use_tqdm=False) as own:
        assert {answer.finish_reason for answer in answers(own, kind, False)} == {"stop"}


def test_no_request_is_made_of_what_cannot_be_promised(llm: LLM) -> None:
    good, bad = SamplingParams(structured_outputs=YES), SamplingParams(structured_outputs={"json": {"not": {}}})
    steps = llm.engine.scheduler.num_steps
    with pytest.raises(InvalidSamplingParams, match="Unimplemented keys"):
        llm.generate(["a", "b"], [good, bad], use_tqdm=False)
    assert llm.engine.scheduler.num_steps == steps, "nothing has run"


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 20}, {"allowed_token_ids": [5]}],
    ids=lambda params: next(iter(params)),
)
def test_where_nothing_is_left_only_that_request_ends(llm: LLM, params: dict[str, Any]) -> None:
    asked = [SamplingParams(seed=1, max_tokens=30, structured_outputs=YES, **own) for own in ({}, params)]
    alone = llm.generate("def f", asked[0], use_tqdm=False)[0].outputs[0]
    with pytest.raises(StepFailed) as failed:
        llm.generate(["def f", "def g"], asked, use_tqdm=False)
    assert isinstance(failed.value.__cause__, NoTokenLeft)
    beside, ended = (output.outputs[0] for output in failed.value.outputs)
    assert (beside.token_ids, ended.finish_reason) == (alone.token_ids, "error")
    assert_idle(llm)


def test_a_grammar_that_takes_too_much_ends_its_request_by_name(llm: LLM) -> None:
    part = part_of(llm)
    with pytest.raises(StepFailed) as failed:
        say(llm, structured_outputs={"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"})
    assert isinstance(failed.value.__cause__, GrammarTooComplex)
    assert "too many expressions" in str(failed.value)
    assert not part.constraints
    assert say(llm, structured_outputs=YES).finish_reason == "stop"


def test_a_grammar_that_is_slow_again_and_again_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = SamplingParams(seed=1, max_tokens=30)
    [alone] = llm.generate("def g", beside, use_tqdm=False)
    for module in (constraint, mask_filling):
        monkeypatch.setattr(module, "SLOW", -1)  # any time is too much
    slow = SamplingParams(seed=1, max_tokens=30, structured_outputs={"regex": "[a-z]{9}"})
    with pytest.raises(StepFailed, match="again and again") as failed:
        llm.generate(["def g", "def f"], [beside, slow], use_tqdm=False)
    assert isinstance(failed.value.__cause__, GrammarTooComplex)
    assert failed.value.outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_client_is_told_that_its_grammar_was_too_much() -> None:
    failure = StepFailed("the request failed", [])
    failure.__cause__ = GrammarTooComplex("structured_outputs", ": too much")
    assert (api_error_of(failure).status, api_error_of(failure).param) == (400, "structured_outputs")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_masks_that_cannot_be_filled_are_a_failed_step(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_model_len": 200, "num_kv_blocks": 60, "device": "cpu", "async_scheduling": asynchronous}
    with LLM("demo", use_tqdm=False, **options) as own:
        part, expected = part_of(own), say(own, structured_outputs=YES)
        fill = part._fill

        def failing(_: Any) -> Any:
            raise MemoryError("no room for masks")

        monkeypatch.setattr(part, "_fill", failing)
        with pytest.raises(StepFailed, match="no room for masks"):
            say(own, structured_outputs=YES)
        assert "after_step has failed" not in caplog.text
        monkeypatch.setattr(part, "_fill", fill)
        assert say(own, structured_outputs=YES) == expected
        assert not part.constraints
        assert not part._in_flight
        assert_idle(own)


def test_a_request_that_was_made_needs_no_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    part, params = part_of(llm), SamplingParams(seed=1, max_tokens=30, structured_outputs=YES, n=2)
    requests = [llm.engine.make_request("def f", params) for _ in range(2)]
    monkeypatch.setattr(part.grammars, "matcher", None)  # as if others had been asked for since
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert all(own.text in YES["choice"] for request in requests for own in request.output().outputs)


def test_masks_reach_another_process_when_they_are_filled(llm: LLM) -> None:
    engine, plans = llm.engine, []
    launch = engine.executor.launch

    def launching(plan: StepPlan) -> Any:
        plans.append(pickle.loads(pickle.dumps(plan)))
        return launch(plan)

    engine.executor.launch = launching  # type: ignore[method-assign]
    try:
        expected = say(llm, structured_outputs=YES)
    finally:
        engine.executor.launch = launch  # type: ignore[method-assign]
    masks = [plan.extras[MASKS] for plan in plans if MASKS in plan.extras]
    assert len(masks) >= 2
    first = masks[0].wait()
    [(_, count)] = masks[0].rows
    assert first.shape == (count, -(-llm.engine.vocab_size // 32))
    token = expected.token_ids[0]
    assert first.view("uint32")[0, token // 32] >> (token % 32) & 1


def test_an_abort_between_steps_leaves_nothing(llm: LLM) -> None:
    engine, part = llm.engine, part_of(llm)
    request = engine.make_request(
        "def f", SamplingParams(n=3, max_tokens=30, structured_outputs={"regex": "[a-z]{100}"})
    )
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert len(part.constraints) == 3
    engine.abort(request.request_id)
    assert not part.constraints
    assert_idle(llm)


class LateFiller:
    """In the place of the thread that fills masks: they are filled when somebody waits for them. Until then nobody else may use
    their grammars: a thread might.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.held: Counter[Constraint] = Counter()
        self.is_filling = False
        self.num_misused = 0
        for name in ("read", "forced", "allowed"):
            patch.setattr(Constraint, name, self._guarded(getattr(Constraint, name)))
        error = Constraint.error.fget  # type: ignore[attr-defined]
        patch.setattr(Constraint, "error", property(self._guarded(error)))
        patch.setattr(StepMasks, "settle", lambda masks: masks._bits.settle())

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(own: Constraint, *args: Any) -> Any:
            if self.held[own] and not self.is_filling:
                self.num_misused += 1
                raise RuntimeError("Already mutably borrowed")
            return original(own, *args)

        return guarded

    def submit(self, fill: Callable[[Any], Any], asked: Any) -> LateMasks:
        return LateMasks(self, fill, asked)

    def shutdown(self, **_: Any) -> None: ...


class LateMasks:
    def __init__(self, filler: LateFiller, fill: Callable[[Any], Any], asked: Any):
        self.filler, self.fill, self.asked = filler, fill, asked
        self.bits: Any = None
        self._hold(1)

    def _hold(self, count: int) -> None:
        for own, _ in self.asked:
            self.filler.held[own] += count

    def result(self) -> Any:
        if self.bits is None:
            self._hold(-1)
            self.filler.is_filling = True
            self.bits = self.fill(self.asked)
            self.filler.is_filling = False
        return self.bits

    def settle(self) -> None:
        with suppress(Exception):
            self.result()


class Fragile:
    """An engine whose steps fail now and then, before or while they are computed, and whose part for grammars raises behind some.

    Attributes:
        broken: the sequences that such a step or part may end.
    """

    def __init__(self, llm: LLM, rng: random.Random, patch: pytest.MonkeyPatch):
        self.engine, self.rng, self.part = llm.engine, rng, part_of(llm)
        self.broken: set[Any] = set()
        self.num_failed = self.num_raised = 0
        runner, after_step = model_runner(llm), self.part.after_step
        executor = self.engine.executor
        launch = executor.launch

        def launching(plan: StepPlan) -> Any:
            if plan.epoch <= runner._failed_epoch or rng.random() > 0.1:
                return launch(plan)
            runner._failed_epoch = plan.epoch
            step = self.engine.scheduler.in_flight[-1]
            self.broken |= {*step.decodes, *step.runs}
            self.num_failed += 1
            raise Broken("sabotaged")

        def telling(step: Any, result: Any, seqs: Any) -> None:
            after_step(step, result, seqs)
            if rng.random() < 0.15:
                self.broken |= {seq for seq in seqs if seq in self.part.constraints}
                self.num_raised += 1
                raise Broken("a part")

        patch.setattr(executor, "launch", launching)
        patch.setattr(self.part, "after_step", telling)


@pytest.mark.parametrize(("asynchronous", "speculation"), [(False, "ngram"), (True, None), (True, "ngram")])
def test_failing_steps_end_whom_they_computed_and_nobody_reads_a_grammar_that_is_in_use(
    asynchronous: bool, speculation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    options: dict[str, Any] = {"max_model_len": 200, "num_kv_blocks": 60, "use_tqdm": False, "device": "cpu"}
    options |= {"async_scheduling": asynchronous, "speculation": speculation, "max_num_seqs": 3}
    options["max_num_batched_tokens"] = 24
    monkeypatch.setattr(ForcedDrafts, "settle", lambda *counts: seen.update(accepted=counts[-1]))
    with LLM("demo", **options) as own:
        for seed in range(3):
            rng = random.Random(seed)
            own.engine.scheduler.policy, own.engine.scheduler.max_chunk = rng.choice(POLICIES), rng.choice([5, 12])
            requests_and_kinds = draw_requests(rng)
            drawn = [(SHARED[number:], params) for number, (_, params, _) in enumerate(requests_and_kinds)]
            right = own.generate([prompt for prompt, _ in drawn], [params for _, params in drawn], use_tqdm=False)
            for output, (_, _, kind) in zip(right, requests_and_kinds, strict=True):
                assert all(
                    KINDS[kind][1](text.text)
                    for text in output.outputs
                    if kind is not None and text.finish_reason == "stop"
                )
            with monkeypatch.context() as patch:
                fragile = Fragile(own, rng, patch)
                patch.setattr(fragile.part, "_filler", filler := LateFiller(patch))
                requests = [own.engine.make_request(*pair) for pair in drawn]
                for request in requests:
                    own.engine.submit(request)
                for _ in range(2000):
                    if not own.engine.has_unfinished:
                        break
                    own.engine.step()
            for request, expected in zip(requests, right, strict=True):
                assert request.finished
                for seq, said, other in zip(request.sequences, request.output().outputs, expected.outputs, strict=True):
                    assert (said.finish_reason == "error") == (seq.error is not None)
                    if seq.error is None:
                        assert said == other
                    else:
                        assert isinstance(seq.error, Broken)
                        assert seq in fragile.broken
                    seen["ended" if seq.error else "went on"] += 1
            assert_idle(own)
            assert not filler.num_misused
            assert not fragile.part.constraints
            assert not fragile.part._in_flight
            seen["failed"] += fragile.num_failed
            seen["raised"] += fragile.num_raised
        drafter = fragile.part.drafter
        assert drafter is None or (drafter.is_idle and seen["accepted"])
    assert min(seen[name] for name in ("ended", "went on", "failed", "raised")) > 1, seen
