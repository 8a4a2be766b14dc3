"""Collector: moves log probabilities from results to sequences and requests, and orders those of prompts."""

from __future__ import annotations

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.sampling.params import SamplingParams

LOGPROBS = "logprobs"
"""In `StepResult.extras`: {number of a sample: TokenLogprobs}."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""In `StepPlan.extras`: [(index of a chunk in `runs`, number of its first tokens that predict one of the prompt, likeliest
ones)]. In `StepResult.extras`: [(index, a TokenLogprobs for each)].
"""

MAX_PROMPT_LOGPROBS = 128
"""Most tokens of prompts in a step with log probabilities: each takes about as long as all layers of a small model."""


class Collector(PolicyPart):
    """The policy's part of log probabilities.

    `Sequence.logprobs` has an entry for each token of the output, and `Request.prompt_logprobs` one for each of the prompt: None
    where it is not known (yet), and for the first token. The first completion of a request computes those of the prompt.
    """

    def __init__(self) -> None:
        self.is_idle, self._num_running = True, 0  # sequences with log probabilities
        self._num_left = MAX_PROMPT_LOGPROBS  # tokens of prompts with log probabilities that still fit into the step

    def submitted(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, SamplingParams):
            return
        if params.num_logprobs is not None:
            for seq in request.sequences:
                seq.logprobs = [None] * len(seq.output_token_ids)  # the engine that made these tokens has theirs
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
            request.sequences[0].reads_cache = False  # all of its tokens are computed
        self._num_running += sum(map(self.concerns, request.sequences))
        self.is_idle = not self._num_running

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if step.is_dropped or isinstance(result, BaseException):
            return
        for index, entries in result.extras.get(PROMPT_LOGPROBS, ()):
            seq, start = step.runs[index], step.plan.runs[index].start + 1
            known = seq.request.prompt_logprobs
            assert known is not None
            known[start : start + len(entries)] = entries
            seq.reads_cache = known[-1] is not None
        if LOGPROBS in result.extras:
            samplers = step.decodes + [
                seq
                for seq, run in zip(step.runs, step.plan.runs, strict=True)
                for _ in range(run.num_new if run.drafts else run.samples)
            ]
            for number, entry in result.extras[LOGPROBS].items():
                seq = samplers[number]
                # Samples are in order: those behind the last token of a sequence were rejected, or follow its end.
                if seq.logprobs is not None and len(seq.logprobs) < len(seq.token_ids) - seq.num_prompt_tokens:
                    seq.logprobs.append(entry)

    def allowed(self, seq: Sequence, budget: int) -> int:
        return budget if seq.request.prompt_logprobs is None else min(budget, self._num_left)

    def took(self, seq: Sequence, count: int) -> None:
        if seq.request.prompt_logprobs is not None:
            self._num_left -= count

    def concerns(self, seq: Sequence) -> bool:
        return seq.logprobs is not None or seq.request.prompt_logprobs is not None

    def finished(self, seq: Sequence) -> None:
        self._num_running -= self.concerns(seq)
        self.is_idle = not self._num_running

    def complete(self, step: Step) -> None:
        self._num_left, orders = MAX_PROMPT_LOGPROBS, []
        for index, (seq, run) in enumerate(zip(step.runs, step.plan.runs, strict=True)):
            known, params = seq.request.prompt_logprobs, seq.params
            if known is None or seq.index or not isinstance(params, SamplingParams):
                continue
            count = min(run.num_new, seq.num_prompt_tokens - 1 - run.start)
            if count > 0 and known[run.start + count] is None:
                orders.append((index, count, params.prompt_logprobs))
        if orders:
            step.plan.extras[PROMPT_LOGPROBS] = orders
            step.plan.needs_hidden = True
