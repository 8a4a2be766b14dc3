"""Options of fairness."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.config import check_share
from nanoengine.core.errors import InvalidConfig, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessOptions:
    """Options of fairness; all are keyword arguments of `LLM`.

    Args:
        max_client_share: most of the prompt tokens of a step that the requests of one client take while other clients have
            prompts to compute, too. Clients also get equal parts of the rows (`max_num_seqs`) while others wait for one. 1:
            neither limit.
        min_priority: the smallest `priority` that a request may have, so that nobody passes all others. None: any.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    max_client_share: float = 0.5
    min_priority: int | None = None

    def __post_init__(self) -> None:
        check_share("max_client_share", self.max_client_share)
        least = self.min_priority
        if least is not None and (type(least) is not int or not -(2**63) <= least < 2**63):
            raise InvalidConfig(f"min_priority is {shown(least)}: it must be an integer of 64 bits, or None")
