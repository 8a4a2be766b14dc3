"""Options of fairness."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.options import option
from nanoengine.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessOptions(Options):
    """Options of fairness; all are keyword arguments of `LLM`.

    Args:
        fair_shares: whether the time of steps, the rows (`max_num_seqs`) and the blocks are divided among clients that have
            requests at the same time; otherwise first come, first served.
        min_priority: the smallest `priority` that a request may have, so that no request passes all others. None: any.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    fair_shares: bool = True
    min_priority: int | None = option(None, -(2**63), 2**63 - 1)
