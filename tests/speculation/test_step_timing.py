"""Steps that are measured at start-up: they fit into what there is, and leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.messages import UNKNOWN, StepPlan
from nanoengine.speculation.step_timing import HISTORY, MAX_NEW, SIZES, time_steps
from tests.speculation.scripted import FAST


class Watch:
    """A start-up whose runner looks at plans."""

    facts: dict[str, Any]

    def __init__(self, num_rows: int, max_tokens: int, max_len: int, num_blocks: int, block_size: int, num_groups: int):
        self.sizes: list[int] = []
        self.starts: set[int] = set()
        self.num_unsaid = 0  # plans that leave it to others to guess
        self.started: dict[int, int] = {}  # row -> tokens
        self.config = SimpleNamespace(max_num_batched_tokens=max_tokens)
        self.num_rows, self.max_model_len, self.num_blocks, self.block_size = num_rows, max_len, num_blocks, block_size
        self.layouts, self.runner, self.draft = [None] * num_groups, self, None

    def __call__(self) -> None: ...

    def launch(self, plan: StepPlan) -> Watch:
        block_size = self.block_size
        for row, token_ids, tables, sampling in plan.started:
            assert 0 <= row < self.num_rows
            assert sampling.num_prompt_tokens == len(token_ids)
            assert len(tables) == len(self.layouts)
            for table in tables:
                assert all(0 < block <= self.num_blocks for block in table)
                assert -(-len(token_ids) // block_size) <= len(table) <= -(-self.max_model_len // block_size)
            self.started[row] = min(len(table) for table in tables) * block_size
        for row in plan.ended:
            self.started.pop(row, None)
        decodes = zip(plan.decode_rows.tolist(), plan.decode_starts.tolist(), strict=True)
        runs = [(row, start, 1) for row, start in decodes] + [(run.row, run.start, run.num_new) for run in plan.runs]
        assert len({row for row, _, _ in runs}) == len(runs)
        assert all(run.drafts and run.num_new == 1 + len(run.drafts) for run in plan.runs)
        for row, start, num_new in runs:
            assert start + num_new <= min(self.max_model_len, self.started[row])
            assert num_new <= MAX_NEW
            self.starts.add(start)
        if runs:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            said = {draft != UNKNOWN for run in plan.runs for draft in run.drafts}
            self.sizes.append(plan.num_tokens)
            self.num_unsaid += said == {False}
            assert len(said) < 2, "all are said, or none"
        return self


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
    num_rows: int, max_tokens: int, max_len: int, guesses: bool, **sizes: int
) -> None:
    watch: Any = Watch(num_rows, max_tokens, max_len, **sizes)
    watch.draft = object() if guesses else None
    measured, guess_share = time_steps(watch)
    fits = [size for size in SIZES if size <= max_tokens and -(-size // min(MAX_NEW, max_len)) <= num_rows]
    assert [size for size, _ in measured] == fits
    assert all(seconds >= 0 for _, seconds in measured)
    assert set(fits) <= set(watch.sizes)
    assert guess_share >= 0
    assert bool(watch.num_unsaid) == (guesses and min(max_tokens, max_len) > 1)
    assert watch.sizes.count(1) > 2, "the first one warms up"
    assert not watch.started, "all rows are given back"
    assert watch.starts == {min(HISTORY, max_len - min(MAX_NEW, max_len, max_tokens))}, "each token reads a history"
