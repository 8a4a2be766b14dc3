"""What the policy's part of adapters tells the runner's: `StepPlan.extras[LORA]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.features.lora.adapter import Adapter

LORA = "lora"


@dataclass(slots=True)
class Orders:
    """Carried out in this order, before the step computes."""

    drops: list[int] = field(default_factory=list)  # slots whose adapter nobody needs any more
    loads: dict[int, Adapter] = field(default_factory=dict)  # slot -> adapter
    rows: dict[int, int] = field(default_factory=dict)  # a row that starts with an adapter -> its slot
