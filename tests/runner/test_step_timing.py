"""Steps that are measured at start-up: they fit into what there is, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.messages import UNKNOWN, StepPlan
from nanoengine.runner.step_timing import HISTORY, MOST_NEW, SIZES, time_steps
from tests.engine.toys import FAST
from tests.runner.conftest import MakeRunner
from tests.runner.plans import assert_same, execute, prefill


class Watch:
    """Carries plans out by looking at them."""

    def __init__(self, num_rows: int, max_tokens: int, max_len: int, num_blocks: int, block_size: int, num_groups: int):
        self.sizes: list[int] = []
        self.num_unsaid = 0  # plans that leave it to others to guess
        self.started: dict[int, int] = {}  # row -> tokens
        self.num_rows, self.max_tokens, self.max_len = num_rows, max_tokens, max_len
        self.num_blocks, self.block_size, self.num_groups = num_blocks, block_size, num_groups

    def __call__(self, plan: StepPlan) -> None:
        for row, token_ids, tables, sampling in plan.started:
            assert 0 <= row < self.num_rows
            assert sampling.num_prompt_tokens == len(token_ids)
            assert len(tables) == self.num_groups
            for table in tables:
                assert all(0 < block <= self.num_blocks for block in table)
                assert -(-len(token_ids) // self.block_size) <= len(table) <= -(-self.max_len // self.block_size)
            self.started[row] = min(len(table) for table in tables) * self.block_size
        for row in plan.ended:
            self.started.pop(row, None)
        assert len({run.row for run in plan.drafted}) == len(plan.drafted)
        for run in plan.drafted:
            assert run.num_computed + run.num_new <= min(self.max_len, self.started[run.row])
            assert run.num_new <= MOST_NEW
        if plan.drafted:
            assert plan.num_new_tokens <= self.max_tokens
            said = {draft != UNKNOWN for run in plan.drafted for draft in run.drafts}
            self.sizes.append(plan.num_new_tokens)
            self.num_unsaid += said == {False}
            assert len(said) < 2, "all are said, or none"


@FAST
@given(
    num_rows=st.integers(1, 70),
    max_tokens=st.integers(1, 80),
    max_len=st.integers(2, 100),
    num_blocks=st.integers(1, 30),
    block_size=st.sampled_from([1, 3, 4, 16, 256]),
    num_groups=st.integers(1, 3),
    guesses=st.booleans(),
)
def test_steps_fit_into_rows_pool_and_budget(
    num_rows: int, max_tokens: int, max_len: int, num_blocks: int, block_size: int, num_groups: int, guesses: bool
) -> None:
    watch = Watch(num_rows, max_tokens, max_len, num_blocks, block_size, num_groups)
    measured, guess_share = time_steps(
        watch,
        num_rows=num_rows,
        max_tokens=max_tokens,
        max_len=max_len,
        num_blocks=num_blocks,
        block_size=block_size,
        num_groups=num_groups,
        guesses=guesses,
    )
    fits = [size for size in SIZES if size <= max_tokens and -(-size // min(MOST_NEW, max_len)) <= num_rows]
    assert [size for size, _ in measured] == fits
    assert all(seconds >= 0 for _, seconds in measured)
    assert set(fits) <= set(watch.sizes)
    assert guess_share >= 0
    assert bool(watch.num_unsaid) == (guesses and min(max_tokens, max_len) > 1)
    assert watch.sizes.count(1) > 2, "the first one warms up"
    assert not watch.started, "all rows are given back"


def test_each_token_reads_a_history() -> None:
    seen: list[StepPlan] = []
    time_steps(
        seen.append, num_rows=9, max_tokens=64, max_len=HISTORY + MOST_NEW, num_blocks=9, block_size=16, num_groups=1
    )
    assert {run.num_computed for plan in seen for run in plan.drafted} == {HISTORY}


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 5, "max_num_seqs": 3}, {"num_kv_blocks": 1}], ids=str)
def test_a_runner_that_has_measured_is_like_any_other(
    make: MakeRunner, native_folder: Path, options: dict[str, int]
) -> None:
    runner = make(at=native_folder, speculation="ngram", max_model_len=16, **options)
    sizes = [size for size, _ in runner.info.step_seconds]
    assert sizes == [size for size in SIZES if size <= options.get("max_num_batched_tokens", 64)]
    plain = make(at=native_folder, max_model_len=16, **options)
    assert plain.info.step_seconds == ()
    assert_same(execute(runner, prefill(5)), execute(plain, prefill(5)))
