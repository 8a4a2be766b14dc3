"""AdapterPart: the runner's part of adapters: the slot of each row, and the adapters of each step."""

from __future__ import annotations

import numpy as np

from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import RunnerPart
from nanoengine.features.lora.adapted_products import AdaptedProducts, AdapterRows
from nanoengine.features.lora.messages import LORA, AdapterOrders

NONE = -1


class AdapterPart(RunnerPart):
    def __init__(self, products: AdaptedProducts, num_rows: int):
        self.products = products
        self._slots = np.full(num_rows, NONE, np.int32)  # of each row

    def begin(self, plan: StepPlan) -> None:
        orders: AdapterOrders = plan.extras.get(LORA) or AdapterOrders()
        for slot in orders.drops:
            self.products.drop(slot)
        for slot, adapter in orders.loads.items():
            self.products.put(slot, adapter)
        for row in (*plan.ended, *(start.row for start in plan.started)):
            self._slots[row] = NONE
        for row, slot in orders.rows.items():
            self._slots[row] = slot
        self.products.begin(self._groups(plan))

    def _groups(self, plan: StepPlan) -> list[AdapterRows]:
        """The tokens of the step with adapters, by adapter."""
        if not (self._slots > NONE).any():
            return []
        decodes = self._slots[plan.decode_rows]
        runs = np.array([self._slots[run.row] for run in plan.runs], np.int32)
        of_tokens = np.concatenate((decodes, np.repeat(runs, [run.num_new for run in plan.runs])))
        slots = np.unique(of_tokens)
        return [AdapterRows(int(slot), np.flatnonzero(of_tokens == slot)) for slot in slots if slot != NONE]

    def close(self) -> None:
        self.products.begin([])
