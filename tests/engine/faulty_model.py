"""A model that is always behind, and that breaks at one point of one plan, as a real executor can."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from nanoengine.engine.messages import UNKNOWN, StepPlan, StepResult
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from tests.engine.late_model import LateModel, LateStep
from tests.engine.toys import sampled_rows

UNAPPLIED_LAUNCH = "the launch raises, and nothing of the plan was applied"
APPLIED_LAUNCH = "the launch raises, and the plan was applied"
RESULT = "the result raises"
NO_TOKEN = "a row has no token"
CTRL_C_UNAPPLIED = "Ctrl-C at the launch, and nothing of the plan was applied"
CTRL_C_APPLIED = "Ctrl-C at the launch, and the plan was applied"
CTRL_C_RESULT = "Ctrl-C at the result"

POINTS = (UNAPPLIED_LAUNCH, APPLIED_LAUNCH, RESULT, NO_TOKEN, CTRL_C_UNAPPLIED, CTRL_C_APPLIED, CTRL_C_RESULT)


class FaultyModel(LateModel):
    """Breaks at `point` of the plan of number `at`, from 1 on.

    Attributes:
        scheduler: whose plans they are.
        touched: whose data that hurts: the sequences of that plan, of all plans in flight, or the one that has no token.
    """

    scheduler: Scheduler

    def __init__(self, point: str, at: int):
        super().__init__()
        self.point, self.at = point, at
        self.num_launched = 0
        self.touched: list[Sequence] = []
        self._lost: list[int] = []  # blocks whose K/V is wrong, and that is why a row has no token

    def launch(self, plan: StepPlan) -> LateStep:
        step = super().launch(plan)
        self.num_launched += 1
        if self.num_launched == self.at:
            self._break(step)
        return step

    def _break(self, step: LateStep) -> None:
        in_flight = self.scheduler.in_flight
        self.touched = in_flight[-1].everybody()
        if self.point == NO_TOKEN:
            self.touched = [*in_flight[-1].decoded, *in_flight[-1].sampled][:1]
            self._lose_blocks()
            step.work = self._without_the_first_token
        elif self.point == RESULT:
            step.work = self._garbage
        elif self.point == CTRL_C_RESULT:
            step.result = self._interrupt  # type: ignore[method-assign]
        else:
            step.work = self._garbage if self.point in (APPLIED_LAUNCH, CTRL_C_APPLIED) else self._nothing
            if self.point in (CTRL_C_UNAPPLIED, CTRL_C_APPLIED):
                self._interrupt()
            raise RuntimeError("the launch broke")

    def _interrupt(self) -> NoReturn:
        self.touched = [seq for step in self.scheduler.in_flight for seq in step.everybody()]
        raise KeyboardInterrupt

    def _lose_blocks(self) -> None:
        """Those that nobody else reads. With more plans in flight somebody may, and would get no token either."""
        pool = self.scheduler.block_manager.pool
        if self.scheduler.num_in_flight == 1:
            self._lost = [
                block
                for seq in self.touched
                for table in seq.block_tables
                for block in table
                if pool.ref_counts[block] == 1
            ]

    # ---- what the steps do instead

    def _garbage(self, plan: StepPlan) -> StepResult:
        sound: Callable[[StepPlan], bool] = self.fail_if
        self.fail_if = lambda _: True
        try:
            return self.execute(plan)
        finally:
            self.fail_if = sound

    def _nothing(self, plan: StepPlan) -> StepResult:
        self.broken -= {start.row for start in plan.started}
        self.break_rows(plan)
        raise RuntimeError("the launch broke")

    def _without_the_first_token(self, plan: StepPlan) -> StepResult:
        result = self.execute(plan)
        if result.token_ids:
            result.token_ids[0] = UNKNOWN
            result.error = ArithmeticError("NaN")
            self.rows[sampled_rows(plan)[0]].token_ids[-1] = UNKNOWN
            self.slots |= {(block, offset): -1 for block in self._lost for offset in range(self.block_size)}
        return result
