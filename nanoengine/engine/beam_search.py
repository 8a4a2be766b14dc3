"""Beam search: keep the few likeliest continuations of a prompt, and in each step fork those that go on best.

Every beam is a sequence, and the beams of a request move in lockstep: one that has its next token is held until all have. Then
`BeamSearch.select` says which beams go on, and with which tokens; the scheduler makes each a fork of the beam it goes on from.
The scores, the bookkeeping of finished beams and the rule for stopping are those of Hugging Face transformers' `num_beams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanoengine.engine.request import Request
from nanoengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from nanoengine.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A finished continuation."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float  # cumulative_logprob / length ** length_penalty
    stopped: bool  # at an end of text, and not by its length


@dataclass(frozen=True, slots=True)
class Choice:
    """One beam of the next step: which of the present ones it continues, and with which token."""

    parent: int
    token: int


class BeamSearch:
    """The search for one prompt, without any tensors or blocks.

    Args:
        params: beam_width and the rest.
        eos_token_ids: tokens that finish a beam.
        max_tokens: length of the longest continuation.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int], max_tokens: int):
        self.params = params
        self.eos_token_ids = () if params.ignore_eos else tuple(eos_token_ids)
        self.max_tokens = max_tokens
        self.num_candidates = num_candidates(params, self.eos_token_ids)
        self.finished: list[Beam] = []
        self.outputs: list[list[int]] = [[] for _ in range(params.beam_width)]  # generated so far, per beam
        # All beams begin equal: only the first may count in the first step.
        self.scores = [0.0] + [float("-inf")] * (params.beam_width - 1)

    def select(self, logprobs: Sequence[TokenLogprobs]) -> list[Choice]:
        """Go one token on, from the likeliest next tokens of every beam; empty when the search is over."""
        width = self.params.beam_width
        length = len(self.outputs[0]) + 1
        candidates = sorted(
            (
                (score + entry.logprob, -beam, -token)
                for beam, (score, entries) in enumerate(zip(self.scores, logprobs, strict=True))
                for token, entry in entries.items()
            ),
            reverse=True,
        )[: self.num_candidates]
        going: list[tuple[float, Choice]] = []
        for place, (score, beam, token) in enumerate(candidates):
            choice = Choice(-beam, -token)
            stops = choice.token in self.eos_token_ids
            if not stops and length < self.max_tokens:
                going.append((score, choice))
            elif place < width and score > float("-inf"):  # those behind the first `width` are only there to go on
                tokens = [*self.outputs[choice.parent], choice.token]
                self.finished.append(Beam(tokens, score, score / length**self.params.length_penalty, stops))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        going = going[:width]
        if not going or self._is_over(going[0][0], length):
            return []
        self.scores = [score for score, _ in going]
        self.outputs = [[*self.outputs[choice.parent], choice.token] for _, choice in going]
        return [choice for _, choice in going]

    def _is_over(self, best_running: float, length: int) -> bool:
        """Whether no running beam can be expected to get among the finished ones."""
        if len(self.finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.max_tokens
        return best_running / length**penalty <= self.finished[-1].score


def num_candidates(params: BeamSearchParams, eos_token_ids: Sequence[int]) -> int:
    """Continuations looked at in each step: enough that `beam_width` go on even if all ends of text are among them."""
    return max(2, 1 + len(eos_token_ids)) * params.beam_width


@dataclass(slots=True, eq=False, kw_only=True)
class BeamRequest(Request):
    """A request whose completions are the beams of a search."""

    search: BeamSearch
    decode: Callable[[Sequence[int]], str]
    texts: list[str] = field(default_factory=list)  # of the finished beams

    def make_texts(self) -> None:
        """The search is over: decode what it found."""
        beams = self.search.finished
        self.texts = [self.decode(beam.token_ids[:-1] if beam.stopped else beam.token_ids) for beam in beams]

    def output(self) -> RequestOutput:
        """The finished beams, best first; none before the search is over."""
        found = zip(self.search.finished, self.texts, strict=False)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._beam_output(index, beam, text) for index, (beam, text) in enumerate(found)],
            num_cached_tokens=self.completions[0].seq.num_cached_tokens or 0,
            metrics=self._metrics(),
        )

    def _beam_output(self, index: int, beam: Beam, text: str) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            logprobs=None,
            cumulative_logprob=beam.cumulative_logprob,
            finish_reason="stop" if beam.stopped else "length",
            stop_reason=None,
        )
