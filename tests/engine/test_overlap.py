"""Two steps in flight: tokens are the same as with one, whatever happens in between, and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import UNKNOWN, Phase, ScheduledBatch
from nanoengine.engine.request import Request
from nanoengine.sampling_params import BeamSearchParams
from tests.engine.engine_toys import assert_idle, make_engine
from tests.engine.late_model import LateModel
from tests.engine.toys import FAST, VOCAB_SIZE, ToyModel, answer, continuation, make_scheduler, make_sequence

NO_EOS: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wish:
    """One request of a drawn workload."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    stops: frozenset[int]  # it ends at a token whose remainder by 7 is one of these: nobody can foresee it
    arrives: int  # in the engine's step of this number
    abort_at: int | None  # likewise

    @property
    def params(self) -> SamplingParams:
        stops = [token for token in range(VOCAB_SIZE) if token % 7 in self.stops]
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, n=self.n, stop_token_ids=stops, seed=0)


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple),
    st.sampled_from([(1,) * 4, (1,) * 8, (1,) * 9, (1,) * 12]),  # prefixes that meet, at block boundaries
)
wishes = st.builds(
    Wish,
    prompt=prompts,
    max_tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stops=st.frozensets(st.integers(0, 6), max_size=2),
    arrives=st.integers(0, 8),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 14)),
)


def serve(engine: LLMEngine, workload: list[Wish]) -> list[Request]:
    """Run a workload to its end; the invariants are checked after every step."""
    requests = [engine.make_request(list(wish.prompt), wish.params) for wish in workload]
    step = 0
    while step <= 15 or engine.has_unfinished:
        assert step < 3000, "the engine does not come to an end"
        for wish, request in zip(workload, requests, strict=True):
            if wish.arrives == step:
                engine.submit(request)
            if wish.abort_at is not None and wish.abort_at + wish.arrives == step:
                engine.abort(request.request_id)
        engine.step()
        engine.scheduler.check()
        assert all(UNKNOWN not in c.token_ids for r in requests if r.completions for c in r.output().outputs)
        step += 1
    assert_idle(engine)
    assert engine.scheduler.num_in_flight == 0
    return requests


def expected(wish: Wish) -> list[int]:
    """What each completion of a request says, if it is not aborted."""
    tokens = []
    for token in continuation(wish.prompt, wish.max_tokens):
        tokens.append(token)
        if token % 7 in wish.stops:
            break
    return tokens


@FAST
@given(
    workload=st.lists(wishes, min_size=1, max_size=7),
    num_blocks=st.integers(8, 24),
    budget=st.sampled_from([3, 8, 64]),
    max_num_seqs=st.integers(2, 8),
    caching=st.booleans(),
)
def test_tokens_are_those_of_one_step_at_a_time(workload: list[Wish], **options: Any) -> None:
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, max_model_len=30, **options)
    for wish, request in zip(workload, serve(engine, workload), strict=True):
        for output in request.output().outputs:
            tokens = expected(wish)
            said = output.token_ids if output.finish_reason != "stop" else output.token_ids[:-1]
            assert output.text == engine.tokenizer.decode(said)
            if output.finish_reason == "abort":
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert output.token_ids == tokens
                assert output.finish_reason == ("stop" if tokens[-1] % 7 in wish.stops else "length")


def test_under_preemption_and_forks_steps_do_overlap() -> None:
    workload = [Wish((i % 2, 1, 2, i), 12, 1 + i % 3, frozenset({3}), 0, None) for i in range(8)]
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, num_blocks=8, max_model_len=30)
    for wish, request in zip(workload, serve(engine, workload), strict=True):
        assert all(output.token_ids == expected(wish) for output in request.output().outputs)
    assert engine.scheduler.num_preemptions > 5
    assert engine.scheduler.num_forks > 3
    assert model.num_overlapping > 0.8 * len(model.batches)


def test_a_step_costs_one_step_more_only_where_an_end_could_not_be_foreseen() -> None:
    def num_computed(stops: frozenset[int], depth: int) -> int:
        model = LateModel()
        serve(make_engine(model, eos=NO_EOS, max_steps_in_flight=depth), [Wish((1, 2, 3), 9, 1, stops, 0, None)])
        return model.num_computed

    assert num_computed(frozenset(), 2) == num_computed(frozenset(), 1) == 3 + 8
    stop = frozenset({continuation((1, 2, 3), 3)[-1] % 7})
    assert num_computed(stop, 2) == num_computed(stop, 1) + 1


def test_the_next_step_takes_tokens_that_nobody_has_seen() -> None:
    scheduler = make_scheduler()
    a, b = make_sequence(0, [1, 2, 3]), make_sequence(1, [4, 5])
    scheduler.add(a)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.phase, second.phase) == (Phase.PREFILL, Phase.DECODE)
    assert second.token_ids == [UNKNOWN]
    assert second.num_computed_tokens == [3]
    assert second.rows == first.sampled_into == [a.row]
    scheduler.add(b)
    third = scheduler.schedule()
    assert third.seq_ids == [b.seq_id]
    scheduler.update(first, answer(first, 8))
    scheduler.update(second, answer(second, 9))
    assert a.output_token_ids == [8, 9]
    scheduler.update(third, answer(third, 7))
    assert scheduler.schedule().token_ids == [9, 7]
    scheduler.check()


def test_a_row_is_given_on_at_once_and_belongs_to_one() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = make_sequence(0, [1, 2], max_tokens=1), make_sequence(1, [3, 4], max_tokens=1)
    scheduler.add(a)
    scheduler.add(b)
    batch = scheduler.schedule()
    assert not scheduler.schedule(), "its only token is on its way: there is nothing to decode"
    scheduler.update(batch, answer(batch))
    assert a.finish_reason == "length"
    assert scheduler.schedule().rows == [0]
    scheduler.check()


def test_beams_wait_for_their_results() -> None:
    class WithLogprobs(LateModel):
        def execute(self, batch: ScheduledBatch) -> Any:
            from nanoengine.outputs import TokenLogprob

            sampled = super().execute(batch)
            sampled.logprobs = [
                {(token + i) % VOCAB_SIZE: TokenLogprob(-0.5 - i, i + 1) for i in range(row.params.num_logprobs or 0)}
                for token, row in zip(sampled.token_ids, batch.sampling, strict=True)
            ]
            return sampled

    results = []
    for depth in (1, 2):
        model = WithLogprobs()
        engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=depth)
        request = engine.make_beam_request([1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=6))
        engine.submit(request)
        while engine.has_unfinished:
            engine.step()
            engine.scheduler.check()
        assert model.num_overlapping == 0
        results.append([output.token_ids for output in request.output().outputs])
    assert results[0] == results[1]


# ---- when a step fails


def poisoned(batch: ScheduledBatch) -> bool:
    return 13 in batch.token_ids


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_ends_its_own_requests_and_no_others(depth: int) -> None:
    model = LateModel(fail_if=poisoned)
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=depth)
    good = engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    for _ in range(2):
        engine.step()
    bad = engine.add_request([13] * 9, SamplingParams(temperature=0.0, max_tokens=9))
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert isinstance(bad.error, RuntimeError)
    assert good.output().outputs[0].token_ids == continuation([1, 2, 3], 9)


def test_who_shares_what_a_failed_step_was_to_write_fails_with_it() -> None:
    """A prompt that was admitted while the step was on its way has hit blocks that will never be written."""
    model = LateModel(fail_if=lambda batch: len(batch.token_ids) == 9 and batch.phase is Phase.PREFILL)
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2, max_num_seqs=8, budget=9)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    first = engine.add_request([1] * 9, params)
    second = engine.add_request([1] * 9 + [2], params)
    other = engine.add_request([3] * 4, params)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_idle(engine)
    assert first.error is not None
    assert second.error is not None
    assert other.output().outputs[0].token_ids == continuation([3] * 4, 5)
    again = engine.add_request([1] * 8, params)
    while engine.has_unfinished:
        engine.step()
    assert again.output().num_cached_tokens == 0, "what was never written is never hit"
    assert again.output().outputs[0].token_ids == continuation([1] * 8, 5)


def run_to_the_end(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("where", ["launch", "result"])
def test_after_ctrl_c_the_engine_goes_on(where: str) -> None:
    class Interrupting(LateModel):
        armed = False

        def launch(self, batch: ScheduledBatch) -> Any:
            if self.armed and where == "launch":
                self.armed = False
                raise KeyboardInterrupt
            step = super().launch(batch)
            if self.armed:
                self.armed = False

                def interrupted() -> Any:
                    raise KeyboardInterrupt

                step.result = interrupted  # type: ignore[method-assign]
            return step

    model = Interrupting()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    engine.add_request([1, 2, 3], params)
    engine.step()
    model.armed = True
    with pytest.raises(KeyboardInterrupt):
        run_to_the_end(engine)
    engine.scheduler.check()
    assert_idle(engine)
    request = engine.add_request([1, 2, 4], params)
    while engine.has_unfinished:
        engine.step()
    assert request.output().outputs[0].token_ids == continuation([1, 2, 4], 9)


def test_closing_waits_for_what_is_on_its_way() -> None:
    model = LateModel()
    engine = make_engine(model, eos=NO_EOS, max_steps_in_flight=2)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=50))
    engine.step()
    assert engine.scheduler.num_in_flight
    engine.close()
    assert engine.scheduler.num_in_flight == 0
    assert not model.queue
    assert model.closed == 1


def test_an_eager_executor_takes_two_steps_in_flight_as_well() -> None:
    workload = [Wish((i, i, 2), 7, 1, frozenset({i % 7}), i, None) for i in range(6)]
    engine = make_engine(ToyModel(), eos=NO_EOS, max_steps_in_flight=2)
    for wish, request in zip(workload, serve(engine, workload), strict=True):
        assert request.output().outputs[0].token_ids == expected(wish)
