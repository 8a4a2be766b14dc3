"""A plan that raises leaves its rows broken, and all others as they were; a row that begins anew is whole again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.engine.messages import UNKNOWN, Chunk, Entries, StepPlan
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner.model_runner import ModelRunner
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import assert_same, decodes, execute, fill_with_nan, kv_of, start
from tests.runner.random_plans import RandomPlans
from tests.runner.texts import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, NUM_ROWS, Texts

STAGES = {
    "before all": ("mover", "begin", False),
    "when its copies are done": ("mover", "begin", True),
    "before its changes": ("rows", "apply", False),
    "when its changes are made": ("rows", "apply", True),
    "before rows begin to be sampled": ("sampler", "start", False),
    "when rows have begun to be sampled": ("sampler", "start", True),
    "with its masks": ("sampler", "set_masks", True),
    "before the forward": ("model", "forward", False),
    "behind the forward": ("model", "forward", True),
    "in the logits": ("model", "compute_logits", False),
    "in the sampler": ("sampler", "sample", False),
    "behind the sampler": ("sampler", "sample", True),
}
"""Where a plan may raise: before or behind a method of a part of the runner."""

WRITES = {"behind the forward", "in the logits", "in the sampler", "behind the sampler"}
"""Where its K/V are there."""


class Broken(Exception):
    """What a plan raises here."""


class Fault:
    """Lets a runner's plans raise at a stage, those whose numbers are in `plans`."""

    def __init__(self, runner: ModelRunner, stage: str, plans: set[int], error: type[BaseException] = Broken):
        self.plans, self.error = plans, error
        self.number = -1  # of the plan that is executed
        part, method, self.is_behind = STAGES[stage]
        self._watch(getattr(runner, part), method, self._raise)
        self._watch(runner.mover, "begin", self._count)  # the first that is called

    def _watch(self, part: Any, method: str, how: Callable[..., Any]) -> None:
        true = getattr(part, method)
        setattr(part, method, lambda *args, **kwargs: how(true, *args, **kwargs))

    def _count(self, true: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return true(*args, **kwargs)

    def _raise(self, true: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.number not in self.plans:
            return true(*args, **kwargs)
        if self.is_behind:
            true(*args, **kwargs)
        raise self.error(f"plan {self.number}")


# ---- one plan that raises, and those that are on their way behind it

A, B, C, D = range(1, 22), range(30, 36), range(40, 53), range(60, 78)
OPTIONS = {"max_num_seqs": 6, "kernels": "torch"}
WISHES = {"temperature": 1.5, "frequency_penalty": 1.0}
ODD = bytes([0b10101010] * 40)

BEGIN = StepPlan(
    started=[start(0, A, [1, 2], **WISHES), start(2, B, [3], **WISHES, logprobs=2)],
    chunks=[Chunk(0, 0, 21, (0,)), Chunk(2, 0, 6, (2,))],
)
RAISES = StepPlan(  # the row of A is another one's, whose blocks are cached
    started=[start(0, C, [7], **WISHES), start(5, D, [9, 10], prompt_logprobs=1)],
    ended=[0],
    chunks=[Chunk(0, 0, 13, (0,)), Chunk(5, 0, 11, ())],
)
DECODES = StepPlan(decodes=decodes((0, 13), (2, 6)), masks=[(0, ODD)], tables=[Entries(0, 0, 1, [8])])
MIXED = StepPlan(
    started=[start(1, D, [9, 10], prompt=18, **WISHES)],  # a fork of what is not there
    decodes=decodes((0, 14), (2, 7)),
    chunks=[Chunk(5, 11, 7, (5, 1))],
)
FORKED = StepPlan(decodes=decodes((2, 8), (1, 18)))
HEAL = StepPlan(
    started=[start(0, C, [7], **WISHES), start(5, D, [9, 10], **WISHES)],
    decodes=decodes((2, 9)),
    chunks=[Chunk(0, 0, 13, (0,)), Chunk(5, 0, 18, (5,))],
)
AFTER = StepPlan(decodes=decodes((5, 18), (2, 10), (0, 13)))

KINDS = ["at once", "late", "recorded"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a runner: its steps are executed when they are launched, or later, or from recordings."""
    if request.param == "at once":
        return OPTIONS
    monkeypatch.setattr(TorchKernels, "capturable", True)
    monkeypatch.setattr(TorchAttention, "capturable", True)
    return OPTIONS | {"stream": FakeStream(can_record=request.param == "recorded")}


def launch_broken(runner: ModelRunner, plan: StepPlan, later: list[StepPlan]) -> list[Any]:
    """Launch a plan that raises, and others behind it; their results."""
    if isinstance(runner.stream, FakeStream):
        first, *steps = [runner.launch(plan) for plan in (plan, *later)]
        assert runner.stream.num_overlapping
        with pytest.raises(Broken, match="plan 1"):
            first.result()
    else:
        with pytest.raises(Broken, match="plan 1"):
            runner.launch(plan)
        steps = [runner.launch(plan) for plan in later]
    return [step.result() for step in steps]


@pytest.mark.parametrize("stage", STAGES)
def test_plans_behind_one_that_raises_compute_the_other_rows_alone(
    make: MakeRunner, kind: dict[str, Any], stage: str
) -> None:
    right = fill_with_nan(make(**OPTIONS))  # where B runs alone
    expected = [execute(right, StepPlan(started=BEGIN.started[1:], chunks=BEGIN.chunks[1:]))]
    expected += [execute(right, StepPlan(decodes=decodes((2, position)))) for position in range(6, 11)]
    cured = fill_with_nan(make(**OPTIONS))  # where nothing has raised
    whole = [execute(cured, StepPlan(started=HEAL.started, chunks=HEAL.chunks))]
    whole.append(execute(cured, StepPlan(decodes=decodes((5, 18), (0, 13)))))

    runner = fill_with_nan(make(**kind))
    Fault(runner, stage, {1})
    first = execute(runner, BEGIN)
    assert first.token_ids[1] == expected[0].token_ids[0]
    before = kv_of(runner).view(torch.int32)
    second, third, fourth = launch_broken(runner, RAISES, [DECODES, MIXED, FORKED])

    assert second.token_ids == [UNKNOWN, *expected[1].token_ids]
    assert second.logprobs.keys() == {1}
    assert third.token_ids == [UNKNOWN, *expected[2].token_ids, UNKNOWN, UNKNOWN]
    assert fourth.token_ids == [*expected[3].token_ids, UNKNOWN], "a fork of what was not computed is not sound either"
    for result, other, number in ((second, expected[1], 1), (third, expected[2], 1), (fourth, expected[3], 0)):
        assert result.error is None
        assert result.prompt_logprobs == []
        other.token_ids, other.logprobs = result.token_ids, {number: other.logprobs[0]}
        assert_same(result, other)

    after, slots = kv_of(runner).view(torch.int32), [(3, 6), (3, 7), (3, 8)]  # of B
    if stage in WRITES:
        slots += [(7, i) for i in range(13)] + [(9, i) for i in range(11)]
    touched = torch.zeros(after.shape[1], 16, dtype=torch.bool)
    touched[tuple(zip(*slots, strict=True))] = True
    changed = by_slot(before != after)
    assert torch.equal(changed, touched), "every bit that may not change"
    reference = kv_of(right)
    torch.testing.assert_close(
        by_slot_values(kv_of(runner))[3, :9], by_slot_values(reference)[3, :9], rtol=0, atol=1e-5
    )

    healed, last = execute(runner, HEAL), execute(runner, AFTER)
    assert healed.token_ids == [*expected[4].token_ids, *whole[0].token_ids]
    assert last.token_ids == [whole[1].token_ids[0], *expected[5].token_ids, whole[1].token_ids[1]]


def by_slot_values(kv: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, everything of a slot]; the reference's blocks are [block_size, num_kv_heads, head_dim]."""
    return kv.permute(1, 2, 0, 3, 4).flatten(2)


def by_slot(kv: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size]: whether anything of a slot is set."""
    return by_slot_values(kv).any(-1)


def test_an_interrupted_plan_is_one_that_raised(make: MakeRunner) -> None:
    right, runner = make(**OPTIONS), make(**OPTIONS)
    execute(right, BEGIN)
    (expected,) = execute(right, StepPlan(decodes=decodes((2, 6)))).token_ids
    Fault(runner, "behind the forward", {1}, KeyboardInterrupt)
    execute(runner, BEGIN)
    with pytest.raises(KeyboardInterrupt):
        runner.launch(RAISES)
    assert execute(runner, DECODES).token_ids == [UNKNOWN, expected]


def test_a_row_stays_broken_until_it_begins_anew(make: MakeRunner) -> None:
    runner = make(**OPTIONS)
    Fault(runner, "before the forward", {1})
    execute(runner, BEGIN)
    with pytest.raises(Broken):
        runner.launch(StepPlan(decodes=decodes((0, 21))))
    for changes in (StepPlan(), StepPlan(ended=[0]), StepPlan(tables=[Entries(0, 0, 2, [5])])):
        changes.decodes = decodes((0, 21))
        assert execute(runner, changes).token_ids == [UNKNOWN]
    assert UNKNOWN not in execute(runner, StepPlan([start(0, A, [1, 2])], chunks=[Chunk(0, 0, 21, (0,))])).token_ids


@pytest.mark.parametrize(
    "change",
    [
        {"started": [start(2, B, [3])]},
        {"tables": [Entries(2, 0, 1, [4])]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_row_that_was_to_change_is_broken_whether_or_not_it_was_computed(
    make: MakeRunner, change: dict[str, Any]
) -> None:
    runner = make(**OPTIONS)
    Fault(runner, "before its changes", {1})
    execute(runner, BEGIN)
    with pytest.raises(Broken):
        runner.launch(StepPlan(**change, decodes=decodes((0, 21))))
    assert execute(runner, StepPlan(decodes=decodes((0, 22), (2, 6)))).token_ids == [UNKNOWN, UNKNOWN]


def test_rows_of_several_plans_that_raised_are_all_broken(make: MakeRunner) -> None:
    runner = make(**OPTIONS)
    Fault(runner, "before its changes", {1, 2})
    execute(runner, BEGIN)
    for plan in (StepPlan(decodes=decodes((0, 21))), StepPlan([start(1, D, [9, 10])], chunks=[Chunk(1, 0, 5, ())])):
        with pytest.raises(Broken):
            runner.launch(plan)
    plan = StepPlan(decodes=decodes((0, 22), (2, 6)), chunks=[Chunk(1, 5, 13, (1,))])
    assert [token == UNKNOWN for token in execute(runner, plan).token_ids] == [True, False, True]


# ---- any plans


def rows_of(plan: StepPlan) -> set[int]:
    """All rows that a plan names, but for those that end."""
    changed = {begun.row for begun in plan.started} | {entries.row for entries in plan.tables}
    sampled = {row for chunk in plan.chunks for row in (chunk.row, *chunk.samples)}
    return changed | sampled | set(plan.decodes.rows.tolist())


class Oracle:
    """Which rows are broken, and so what a plan samples."""

    def __init__(self) -> None:
        self.broken: set[int] = set()

    def reaches_sampler(self, plan: StepPlan) -> bool:
        """Whether there will be anything to sample in a plan."""
        broken = self.broken - {begun.row for begun in plan.started}
        samplers = {*plan.decodes.rows.tolist(), *(chunk.row for chunk in plan.chunks if chunk.samples)}
        return not samplers <= broken

    def expect(self, plan: StepPlan, expected: list[int], *, raises: bool) -> list[int] | None:
        """The tokens of a plan, of which `expected` are those of whole rows; None if it raises."""
        self.broken -= {begun.row for begun in plan.started}
        if raises:
            self.broken |= rows_of(plan)
            return None
        runs = [(row, (row,)) for row in plan.decodes.rows.tolist()]
        runs += [(chunk.row, chunk.samples) for chunk in plan.chunks]
        dropped = [row in self.broken for row, samples in runs for _ in samples]
        self.broken |= {into for row, samples in runs if row in self.broken for into in samples}
        return [UNKNOWN if gone else token for gone, token in zip(dropped, expected, strict=True)]


@settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rng=st.randoms(use_true_random=True), depth=st.integers(1, 3), stage=st.sampled_from(sorted(STAGES)))
def test_whatever_raises_rows_are_whole_or_say_that_they_are_not(
    make: MakeRunner, native_folder: Path, texts: Texts, rng: random.Random, depth: int, stage: str
) -> None:
    stream = FakeStream(seed=rng.randrange(100))
    runner = fill_with_nan(make(at=native_folder, stream=stream, kernels="torch", **Texts.options))
    fault, oracle = Fault(runner, stage, set()), Oracle()
    plans = RandomPlans(
        rng,
        num_rows=NUM_ROWS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_len=MAX_LEN,
        continuation=texts,
        params=Texts.params,
    )
    flight: deque[Any] = deque()

    def take() -> None:
        step, expected = flight.popleft()
        if expected is None:
            with pytest.raises(Broken):
                step.result()
        else:
            assert step.result().token_ids == expected

    for number in range(25):
        plan = plans.next()
        raises = rng.random() < 0.2 and oracle.reaches_sampler(plan)
        if raises:
            fault.plans.add(number)
        expected = oracle.expect(plan, plans.expected, raises=raises)
        plans.unsound = oracle.broken
        flight.append((runner.launch(plan), expected))
        if len(flight) == depth:
            take()
    while flight:
        take()
    runner.close()
