"""BeamSearchParams: the parameters of a beam search."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.options import check, option

MAX_CANDIDATES = 100
"""Most candidates for the next token of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of the search for the likeliest continuations. Names and meanings follow vLLM and transformers.

    A search stops when `beam_width` beams are finished, and the best running beam would not be among them if it ended now.

    Args:
        beam_width: running beams in each step, and results at the end.
        max_tokens: most new tokens.
        length_penalty: the score of a beam is its log probability divided by its length to this power: above 0 favours
            long beams, below 0 short ones.
        ignore_eos: treat the model's end-of-text tokens like any others.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    beam_width: int = option(MISSING)
    max_tokens: int = option(64)
    length_penalty: float = option(1.0, -10, 10)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check(self, InvalidSamplingParams)

    def num_candidates(self, eos_token_ids: Collection[int]) -> int:
        """The number of candidates in a step: so that `beam_width` go on even if all ends of text are among them.

        Raises:
            InvalidSamplingParams: more than `MAX_CANDIDATES`.
        """
        count = max(2, 1 + len(eos_token_ids)) * self.beam_width
        if count > MAX_CANDIDATES:
            raise InvalidSamplingParams(
                "beam_width",
                f" is {self.beam_width}: its {count} candidates a step (beams x (1 + end-of-text tokens), at "
                f"least 2 a beam) are more than {MAX_CANDIDATES}: lower it",
            )
        return count
