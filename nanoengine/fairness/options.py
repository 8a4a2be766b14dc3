"""Options of fairness."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.config import check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessOptions:
    """Options of fairness; all are keyword arguments of `LLM`.

    Args:
        max_client_share: most of the prompt tokens of a step that the requests of one client take while other clients have
            prompts to compute, too. Clients also get equal parts of the rows (`max_num_seqs`) while others wait for one. 1:
            neither limit.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    max_client_share: float = 0.5

    def __post_init__(self) -> None:
        check_share("max_client_share", self.max_client_share)
