"""What an executor knows that has nothing but plans and its own samples: rows, each with its tokens and its block table."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass

from nanoengine.engine.messages import UNKNOWN, Drafted, StepPlan, StepResult
from nanoengine.engine.scheduler import Scheduler


@dataclass(eq=False)
class MirrorRow:
    token_ids: list[int]  # UNKNOWN: sampled by a plan whose results have not come
    tables: list[list[int]]
    num_computed: int | None = None  # None: it has not run yet


class PlanMirror:
    """Follows the plans of a scheduler, all of which go well, and compares what they say with what the scheduler knows.

    From the moment at which it is made, `scheduler.schedule` and `scheduler.update` tell it everything. It takes plans as bytes.

    Attributes:
        num_plans: that it has seen.
        num_quiet: of these, how many decode and say nothing else.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.rows: dict[int, MirrorRow] = {}
        self.num_plans = 0
        self.num_quiet = 0
        self._samples: deque[list[tuple[MirrorRow, int]]] = deque()  # of each plan in flight: (row, position)
        self._drafted: deque[list[tuple[MirrorRow, Drafted]]] = deque()  # the same
        self._schedule, self._update = scheduler.schedule, scheduler.update
        scheduler.schedule = self.schedule  # type: ignore[method-assign]
        scheduler.update = self.update  # type: ignore[method-assign]

    def schedule(self) -> StepPlan:
        plan = self._schedule()
        if plan:
            self.apply(pickle.loads(pickle.dumps(plan)))
            self.compare()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> object:
        advanced = self._update(plan, result)
        for (row, position), token in zip(self._samples.popleft(), result.token_ids, strict=True):
            row.token_ids[position] = token
        for (row, run), num_accepted in zip(self._drafted.popleft(), result.num_accepted, strict=True):
            row.num_computed = run.num_computed + 1 + num_accepted
            del row.token_ids[row.num_computed + 1 :]
            for table, own in zip(row.tables, self._tables_of(run.row), strict=False):
                del table[len(own) :]  # of blocks that were given back, the executor keeps the ids
        return advanced

    def _tables_of(self, row: int) -> list[list[int]]:
        return next((seq.block_tables for seq in self.scheduler.running if seq.row == row), [])

    def apply(self, plan: StepPlan) -> None:
        self.num_plans += 1
        self.num_quiet += not (
            plan.started or plan.tables or plan.ended or plan.drafted or plan.chunks or plan.transfers
        )
        for row in plan.ended:
            del self.rows[row]
        for row, token_ids, tables, _ in plan.started:
            self.rows[row] = MirrorRow(token_ids, list(tables))
        for row, group, first, block_ids in plan.tables:
            table = self.rows[row].tables[group]
            assert first <= len(table)
            table[first : first + len(block_ids)] = block_ids
        size = self.scheduler.block_manager.block_size
        befores = [*plan.decodes.num_computed.tolist(), *(run.num_computed for run in plan.drafted)]
        assert all(shared * size <= min(befores) for shared in plan.num_common_blocks), "no new token is among them"
        samples: list[tuple[MirrorRow, int]] = []
        for row, before in zip(plan.decodes.rows.tolist(), plan.decodes.num_computed.tolist(), strict=True):
            state = self.rows[row]
            assert before == len(state.token_ids) - 1, "a decode computes the last token"
            self._compute(state, before, 1)
            samples.append(self._sample(state))
        for run in plan.drafted:
            state = self.rows[run.row]
            assert run.num_computed == len(state.token_ids) - 1, "it begins with the last token"
            assert UNKNOWN not in state.token_ids, "the guess was made behind all that there is"
            state.num_computed = run.num_computed + run.num_new
            state.token_ids += [UNKNOWN] * run.num_new
            samples += [(state, run.num_computed + 1 + i) for i in range(run.num_new)]
        for chunk in plan.chunks:
            state = self.rows[chunk.row]
            self._compute(state, chunk.num_computed, chunk.num_new)
            end = chunk.num_computed + chunk.num_new
            assert UNKNOWN not in state.token_ids[:end], "a chunk has the tokens that its row began with"
            assert bool(chunk.samples) == (end == len(state.token_ids))
            for into in chunk.samples:
                child = self.rows[into]
                assert child is state or child.num_computed is None
                child.num_computed = end
                samples.append(self._sample(child))
        self._samples.append(samples)
        self._drafted.append([(self.rows[run.row], run) for run in plan.drafted])

    def _compute(self, row: MirrorRow, before: int, count: int) -> None:
        assert row.num_computed in (None, before), "nothing is left out and nothing is computed twice"
        row.num_computed = before + count
        assert row.num_computed <= len(row.token_ids)

    def _sample(self, row: MirrorRow) -> tuple[MirrorRow, int]:
        assert row.num_computed == len(row.token_ids)
        row.token_ids.append(UNKNOWN)
        return row, len(row.token_ids) - 1

    def compare(self) -> None:
        """A plan has just been made: what all plans have said is what the scheduler has."""
        scheduler = self.scheduler
        assert self.rows.keys() == {seq.row for seq in scheduler.running}
        for seq in scheduler.running:
            if scheduler.outbox.restarts(seq) or seq in scheduler.held:  # they will begin anew
                continue
            row = self.rows[seq.row]
            assert row.tables == seq.block_tables
            assert len(row.token_ids) == seq.num_tokens
            assert row.num_computed == seq.num_computed_tokens
            assert row.token_ids[: seq.num_known_tokens] == seq.token_ids
            assert all(token == UNKNOWN for token in row.token_ids[seq.num_known_tokens :])
