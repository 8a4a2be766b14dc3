"""ThinkingPart: parameters of the answer hold from its first token on, and a thought ends at its budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanoengine.core.messages import Started, StepResult
from nanoengine.core.options import MAX_INT32
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.features.draft_constraint import CONSTRAINT
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.thought import ThoughtReader

THOUGHT = "thought"
"""In `Sequence.state`: the `ThoughtReader` of a sequence with parameters of its answer."""

ENDS_OF_THOUGHTS = "ends of thoughts"
"""In `StepPlan.extras`: a list of `Started`, the rows with other parameters from this step on: those whose answer begins, and
those whose thought is at its budget, where one token is allowed.
"""


class ThinkingPart(PolicyPart):
    """Follows the thoughts of sequences with parameters of their answers.

    Args:
        decode: see `Tokenizer.decode`.
    """

    is_idle = True

    def __init__(self, decode: Callable[..., str]):
        self._decode = decode
        self._thinking: dict[Sequence, bool] = {}  # open thoughts -> whether the answer has other parameters
        self._answering: list[Sequence] = []  # with new parameters that the runner does not have yet

    def submitted(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, SamplingParams) or params.thought is None:
            return
        for seq in request.sequences:
            reader = ThoughtReader(params.thought, self._decode, params.thinking_budget)
            reader.read(seq.output_token_ids)
            seq.state[THOUGHT] = reader
            if not reader.is_open:
                self._answer(seq, reader)
                continue
            ends = seq.stop_token_ids - frozenset(params.stop_token_ids)
            thinking = _while_thinking(params, seq.stop_token_ids)
            is_sampled_otherwise = thinking != dataclasses.replace(params, thought=None, stop_token_ids=())
            seq.stop_token_ids = ends
            seq.sampling = dataclasses.replace(seq.sampling, params=thinking, stop_token_ids=tuple(sorted(ends)))
            self._thinking[seq] = is_sampled_otherwise
            if is_sampled_otherwise or params.stop_token_ids or params.thinking_budget is not None:
                seq.state[CONSTRAINT] = reader
            self.is_idle = False

    def postponed(self, scheduler: Scheduler) -> Iterator[Sequence]:
        for seq, needs_all in self._thinking.items():
            if seq.phase is Phase.DECODING and not seq.has_all_tokens and (needs_all or self._is_near_limit(seq)):
                yield seq

    def _is_near_limit(self, seq: Sequence) -> bool:
        reader: ThoughtReader = seq.state[THOUGHT]
        num_in_flight = seq.num_tokens - len(seq.token_ids)
        return reader.budget is not None and reader.num_thought + num_in_flight >= reader.budget

    def complete(self, step: Step) -> None:
        changed = [seq for seq in self._answering if seq.block_tables and seq not in step.started]
        orders = [Started(seq.row, seq.token_ids.copy(), [], seq.sampling) for seq in changed]
        self._answering.clear()
        for seq in [*step.decodes, *(seq for seq, run in zip(step.runs, step.plan.runs, strict=True) if run.samples)]:
            if seq in self._thinking and (token := seq.state[THOUGHT].forced_token) is not None:
                thinking: Any = seq.sampling.params
                params = dataclasses.replace(thinking, allowed_token_ids=(token,))
                forced = dataclasses.replace(seq.sampling, params=params)
                orders.append(Started(seq.row, seq.token_ids.copy(), [], forced))
                self._thinking[seq] = True
        if orders:
            step.plan.extras[ENDS_OF_THOUGHTS] = orders
        self._rest()

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq not in self._thinking:
                continue
            reader: ThoughtReader = seq.state[THOUGHT]
            reader.read(seq.token_ids[seq.num_prompt_tokens + reader.num_read :])
            if not reader.is_open:
                self._end(seq, reader)

    def _end(self, seq: Sequence, reader: ThoughtReader) -> None:
        if self._thinking.pop(seq):
            self._answering.append(seq)
        if seq.state.get(CONSTRAINT) is reader:
            del seq.state[CONSTRAINT]
        self._answer(seq, reader)

    def _answer(self, seq: Sequence, reader: ThoughtReader) -> None:
        """The answer of a sequence has begun."""
        params, start = seq.request.params, reader.answer_start
        assert isinstance(params, SamplingParams)
        assert start is not None
        seq.stop_token_ids |= frozenset(params.stop_token_ids)
        least = min(params.min_tokens + start, params.max_tokens or MAX_INT32) if params.min_tokens else 0
        answer = dataclasses.replace(params, min_tokens=least, thought=None)
        stops = tuple(sorted(seq.stop_token_ids))
        seq.sampling = dataclasses.replace(seq.sampling, params=answer, stop_token_ids=stops)

    def finished(self, seq: Sequence) -> None:
        self._thinking.pop(seq, None)
        if seq in self._answering:
            self._answering.remove(seq)
        self._rest()

    def concerns(self, seq: Sequence) -> bool:
        return seq in self._thinking

    def _rest(self) -> None:
        self.is_idle = not self._thinking and not self._answering


def _while_thinking(params: SamplingParams, stops: Iterable[int]) -> SamplingParams:
    """The parameters of a thought. The text does not end before an answer with a grammar or a least length."""
    has_answer = params.min_tokens > 0 or params.structured_outputs is not None
    return dataclasses.replace(
        params,
        thought=None,
        stop_token_ids=(),
        allowed_token_ids=None,
        logit_bias=tuple((token, bias) for token, bias in dict(params.logit_bias).items() if token not in set(stops)),
        min_tokens=(params.max_tokens or MAX_INT32) if has_answer else 0,
    )
