"""What goes wrong in a step ends who is concerned, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.errors import NotFiniteLogits
from nanoengine.core.messages import StepPlan
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Phase

from .lives import draw_requests, draw_way
from .toys import Done, ToyModel, ToyTokenizer, check, make_engine, run

BROKEN = 33


class Watched(ToyModel):
    """Blocks that held NaN are cleared before anybody gets them, and only then."""

    def __init__(self, **options: Any):
        super().__init__(4, **options)
        self.with_nan: set[int] = set()
        self.num_cleared = 0

    def launch(self, plan: StepPlan) -> Done:
        done = super().launch(plan)
        if plan.epoch <= self.failed_epoch:
            return done
        self.num_cleared += len(plan.zeroed)
        self.with_nan -= set(plan.zeroed)
        tables = [table for start in plan.started for table in start.tables]
        given = {block for blocks in (*tables, *(own.block_ids for own in plan.tables)) for block in blocks}
        assert not given & self.with_nan
        return done


def params(max_tokens: int = 4) -> CoreSamplingParams:
    return CoreSamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_kv_without_finite_logits_is_found_by_nobody_and_cleared(depth: int) -> None:
    model = Watched(broken=[(BROKEN, 9)])
    engine = make_engine(num_blocks=15, model=model, depth=depth)
    good = list(range(9))
    run(engine, [engine.make_request(good, params(1))])
    engine.submit(broken := engine.make_request([*good, BROKEN, 1], params()))
    blocks, seq = engine.scheduler.blocks, broken.sequences[0]
    while not broken.finished:
        engine.step()
        model.with_nan |= {block for table in seq.block_tables for block in table} | blocks.dirty
    assert isinstance(broken.error, NotFiniteLogits)
    assert broken.output().outputs[0].finish_reason == "error"
    assert broken.output().outputs[0].token_ids == []
    assert len(blocks.dirty) == 3, "its first two blocks, too, and the last one, which is not full"
    model.failing.add(model.num_launched + 1)
    run(engine, [engine.make_request(good, params(1))])
    assert not model.num_cleared, "the step that was to clear its blocks has failed"
    run(engine, [again := engine.make_request(good, params(1))])
    assert again.output().num_cached_tokens == 0
    run(engine, [engine.make_request([number] * 40, params()) for number in range(2)])
    assert model.num_cleared >= 3
    assert not blocks.dirty


@pytest.mark.parametrize("place", ["launch", "result"])
@pytest.mark.parametrize("error", [ValueError("injected"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_exception_ends_those_in_its_step_and_ctrl_c_ends_nobody(
    place: str, error: BaseException, depth: int
) -> None:
    prompts = [[number] * 10 for number in range(4)]
    engine = make_engine()
    run(engine, right := [engine.make_request(prompt, params(9)) for prompt in prompts])
    model = ToyModel(4)
    engine = make_engine(model=model, depth=depth, max_num_batched_tokens=25)
    launch = model.launch

    def failing(plan: StepPlan) -> Any:
        if model.num_launched != 1:
            return launch(plan)
        launch(plan)
        model.failed_epoch = plan.epoch
        if place == "launch":
            raise error
        return raising

    def raising() -> Any:
        raise error

    model.launch = failing  # type: ignore[method-assign]
    requests = [engine.make_request(prompt, params(9)) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    num_raised = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_raised += 1
            assert not engine.scheduler.in_flight
        assert engine.scheduler.num_steps < 200
    failed = [request for request in requests if request.error is not None]
    assert num_raised == isinstance(error, KeyboardInterrupt)
    assert (0 < len(failed) < 4) == (num_raised == 0)
    assert all(request.error is error for request in failed)
    for request, expected in zip(requests, right, strict=True):
        if request not in failed:
            assert request.output().outputs == expected.output().outputs


def test_an_error_of_the_tokenizer_ends_the_sequence_whose_text_it_is() -> None:
    class Picky(ToyTokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            if forbidden in token_ids:
                raise LookupError("no text")
            return super().decode(token_ids)

    engine = make_engine()
    prompts = [[number] * 5 for number in range(3)]
    run(engine, right := [engine.make_request(prompt, params()) for prompt in prompts])
    tokens = [request.sequences[0].output_token_ids for request in right]
    forbidden = next(token for token in tokens[1] if token not in tokens[0] + tokens[2])
    engine = make_engine()
    engine.tokenizer = Picky()
    run(engine, requests := [engine.make_request(prompt, params()) for prompt in prompts])
    assert [type(request.error) for request in requests] == [type(None), LookupError, type(None)]
    assert [request.output().outputs[0].text for request in requests[::2]] == [
        request.output().outputs[0].text for request in right[::2]
    ]


class BrokenPart(Exception):
    """What a part raises."""


ASKED = ("preemption_victims", "postponed", "candidates", "allowed", "took", "wants_step", "draft", "complete")
TOLD = ("after_step", "finished")


class Fragile(PolicyPart):
    """Watches some requests, and raises now and then in some of what it is asked and told: at once, or behind an answer."""

    def __init__(self, rng: random.Random, share: float, names: Seq[str]):
        self.rng, self.share, self.num_closed = rng, share, 0
        for name in names:
            setattr(self, name, partial(self._perhaps, getattr(self, name)))

    def _perhaps(self, plain: Callable[..., Any], *args: Any) -> Any:
        answer = plain(*args)
        if self.rng.random() >= self.share:
            return answer
        if isinstance(answer, Iterable) and self.rng.random() < 0.5:
            return self._some_of(answer)
        raise BrokenPart

    def _some_of(self, answer: Iterable[Any]) -> Iterator[Any]:
        yield from (own for own in answer if self.rng.random() < 0.9)
        raise BrokenPart

    def concerns(self, seq: Any) -> bool:
        return bool(seq.request.priority)

    def close(self) -> None:
        self.num_closed += 1
        raise BrokenPart


class Told(PolicyPart):
    """Stands behind the fragile one, and is told everything all the same."""

    def __init__(self) -> None:
        self.ended: list[Any] = []
        self.num_closed = 0

    def finished(self, seq: Any) -> None:
        self.ended.append(seq)

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("seed", range(60))
def test_parts_that_raise_end_their_own_requests_alone(seed: int) -> None:
    rng = random.Random(seed)
    run(engine := make_engine(), right := draw_requests(engine, seed))
    num_launches = engine.executor.num_launched  # type: ignore[attr-defined]
    names = [rng.choice(ASKED), *rng.sample(TOLD, rng.randint(0, 2)), *rng.sample(ASKED, rng.choice([0, 0, 3]))]
    fragile, told = Fragile(rng, rng.choice([0.1, 0.5, 1.0]), names), Told()
    failing = [number for number in range(1, 3 * num_launches) if rng.random() < rng.choice([0.0, 0.2])]
    engine = make_engine(model=ToyModel(4, failing=failing), parts=[fragile, told], **draw_way(rng))
    requests = draw_requests(engine, seed)
    run(engine, requests)
    for request, expected in zip(requests, right, strict=True):
        assert request.error is None or (request.priority and isinstance(request.error, BrokenPart)) or failing
        assert not isinstance(request.error, BrokenPart) or request.priority
        for own, other in zip(request.output().outputs, expected.output().outputs, strict=True):
            if request.error is None:
                assert own == other
            assert own.token_ids == other.token_ids[: len(own.token_ids)]
    assert not engine.requests
    assert sorted(map(id, told.ended)) == sorted(id(seq) for request in requests for seq in request.sequences)
    engine.close()
    check(engine.scheduler)
    assert (fragile.num_closed, told.num_closed) == (1, 1)


class Blind(ToyModel):
    """Reads whatever a slot holds, as memory is read."""

    def _next(self, tables: list[list[int]], position: int, seed: int) -> int:
        try:
            return super()._next(tables, position, seed)
        except (KeyError, AssertionError):
            return 0


class FragileStore(KVStore):
    """Loses blocks: it may have any, none can be loaded, and each call may raise."""

    def __init__(self, rng: random.Random):
        self.rng, self.share = rng, rng.choice([0.0, 0.1, 0.5])
        for name in STORED:
            setattr(self, name, partial(self._perhaps, getattr(self, name)))

    def _perhaps(self, plain: Callable[..., Any], *args: Any) -> Any:
        if self.rng.random() < self.share:
            raise BrokenPart
        return plain(*args)

    def has(self, group: int, hash: bytes, tokens: bytes) -> bool:
        return self.rng.random() < 0.3

    def load(self, group: int, hash: bytes, tokens: bytes, block: int) -> None:
        raise BrokenPart


class Hesitant(PolicyPart):
    """Lets prompts start, and sometimes wait with a chunk."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def allowed(self, seq: Any, budget: int) -> int:
        return budget if seq.phase is Phase.WAITING else self.rng.choice([0, budget])


STORED = ("cached", "evicted", "invalidated", "has", "may_end", "hold", "clear", "closing")


@pytest.mark.parametrize("seed", range(40))
def test_a_store_that_raises_ends_those_that_it_was_to_load_alone(seed: int) -> None:
    rng = random.Random(seed)
    run(engine := make_engine(), right := draw_requests(engine, seed))
    blocks = BlockManager(rng.choice([16, 30]), 4, stores=[KVStore(), FragileStore(rng)])
    engine = make_engine(blocks=blocks, model=Blind(4), parts=[Hesitant(rng)], **draw_way(rng))
    num_lost = num_all = 0
    for _ in range(2):
        run(engine, requests := draw_requests(engine, seed))
        for request, expected in zip(requests, right, strict=True):
            for output, right_output, seq in zip(
                request.output().outputs, expected.output().outputs, request.sequences, strict=True
            ):
                assert output == right_output or isinstance(seq.error, BrokenPart | StopIteration)
                assert output.token_ids == right_output.token_ids[: len(output.token_ids)]
                num_lost, num_all = num_lost + (seq.error is not None), num_all + 1
    assert num_lost < 0.9 * num_all, "some go on"
    assert engine.reset_prefix_cache()
    engine.close()
    check(engine.scheduler)


@pytest.mark.parametrize("what", ASKED)
def test_a_part_that_always_raises_ends_those_that_it_concerns_and_the_engine_goes_on(what: str) -> None:
    part = Fragile(random.Random(1), 1.0, [what])
    engine = make_engine(parts=[part])
    requests = [engine.make_request([number] * 9, params(), priority=number % 2) for number in range(4)]
    run(engine, requests)
    assert [type(request.error) for request in requests] == 2 * [
        type(None),
        type(None) if what == "wants_step" else BrokenPart,
    ]
    part.concerns = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    run(engine, [last := engine.make_request([5] * 9, params())])
    assert isinstance(last.error, BrokenPart) != (what == "wants_step")
    engine.close()
    check(engine.scheduler)
