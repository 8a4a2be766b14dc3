"""Messages of adapters from the policy's part to the runner's: `StepPlan.extras[LORA]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.features.lora.adapter import Adapter

LORA = "lora"


@dataclass(slots=True)
class AdapterOrders:
    """The orders of one plan, carried out in this order before the step computes."""

    drops: list[int] = field(default_factory=list)  # slots of unused adapters
    loads: dict[int, Adapter] = field(default_factory=dict)  # slot -> adapter
    rows: dict[int, int] = field(default_factory=dict)  # a row that starts with an adapter -> its slot
