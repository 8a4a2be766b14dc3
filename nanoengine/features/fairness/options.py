"""Options of fairness."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessOptions:
    """Options of fairness; all are keyword arguments of `LLM`.

    Args:
        fair_shares: whether clients that have requests at the same time share the time of steps, the rows (`max_num_seqs`) and
            the blocks; otherwise first come, first served.
        min_priority: the smallest `priority` that a request may have, so that nobody passes all others. None: any.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    fair_shares: bool = True
    min_priority: int | None = None

    def __post_init__(self) -> None:
        if type(self.fair_shares) is not bool:
            raise InvalidConfig(f"fair_shares is {shown(self.fair_shares)}: it must be True or False")
        least = self.min_priority
        if least is not None and (type(least) is not int or not -(2**63) <= least < 2**63):
            raise InvalidConfig(f"min_priority is {shown(least)}: it must be an integer of 64 bits, or None")
