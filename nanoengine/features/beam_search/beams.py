"""Beams: the beam search of one prompt, without an engine.

The scores, the bookkeeping of finished beams and the rule for stopping are those of Hugging Face transformers' `num_beams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoengine.features.beam_search.params import BeamSearchParams

if TYPE_CHECKING:
    from nanoengine.features.sampling.token_logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    """A running continuation."""

    token_ids: list[int]
    logprob: float  # the sum over its tokens


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished continuation."""

    token_ids: list[int]
    logprob: float
    score: float  # logprob / length ** length_penalty
    stopped: bool  # at an end of text, and not by its length


class Beams:
    """The beams of one prompt.

    Args:
        params: of the search.
        eos_token_ids: tokens that finish a beam, unless the params ignore them.
        max_tokens: length of the longest continuation.

    Raises:
        InvalidSamplingParams: see `BeamSearchParams.num_candidates`.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Seq[int], max_tokens: int):
        self.params, self.max_tokens = params, max_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.num_candidates = params.num_candidates(self.eos_token_ids)
        self.running = [Beam([], 0.0)]
        self.finished: list[FinishedBeam] = []  # best first

    def advance(self, logprobs: Seq[Mapping[int, TokenLogprob]]) -> None:
        """Advance all beams by one token; no beam runs when the search is over.

        Args:
            logprobs: for each running beam, its likeliest next tokens.
        """
        width, length = self.params.beam_width, len(self.running[0].token_ids) + 1
        candidates = sorted(
            (
                (beam.logprob + entry.logprob, -index, -token)
                for index, (beam, entries) in enumerate(zip(self.running, logprobs, strict=True))
                for token, entry in entries.items()
            ),
            reverse=True,
        )[: self.num_candidates]
        going: list[Beam] = []
        for rank, (logprob, negative_index, negative_token) in enumerate(candidates):
            token = -negative_token
            tokens = [*self.running[-negative_index].token_ids, token]
            stops = token in self.eos_token_ids
            if not stops and length < self.max_tokens:
                going.append(Beam(tokens, logprob))
            elif rank < width:  # an end among the other candidates does not count
                score = logprob / length**self.params.length_penalty
                self.finished.append(FinishedBeam(tokens, logprob, score, stops))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        self.running = [] if not going or self._is_over(going[0].logprob, length) else going[:width]

    def _is_over(self, best_running: float, length: int) -> bool:
        """Whether no running beam would be among the finished ones if it ended now."""
        if len(self.finished) < self.params.beam_width:
            return False
        return best_running / length**self.params.length_penalty <= self.finished[-1].score
