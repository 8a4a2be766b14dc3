"""Collector: log probabilities on their way from results to sequences and requests; asks the runner for those of prompts."""

from __future__ import annotations

from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.sampling.params import SamplingParams

LOGPROBS = "logprobs"
"""In `StepResult.extras`: {number of a sample: TokenLogprobs}."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""In `StepPlan.extras`: [(place of a chunk in `runs`, its first tokens that predict one of the prompt, how many likeliest)].
In `StepResult.extras`: [(place, a TokenLogprobs for each)].
"""

MOST_TOLD = 128
"""Most tokens of prompts in a step whose log probabilities are told: each takes about as long as all layers of a small model."""


class Collector(PolicyPart):
    """Fills in what was asked for.

    `Sequence.logprobs` has an entry for each token of the output, and `Request.prompt_logprobs` one for each of the prompt: None
    where it is not known (yet); nothing predicts the first token. The first completion of a request computes the prompt's.
    """

    def __init__(self) -> None:
        self.is_idle, self._num_running = True, 0  # sequences with log probabilities
        self._num_left = MOST_TOLD  # tokens of prompts that the step may still tell of

    def submitted(self, request: Request) -> None:
        params = request.params
        if not isinstance(params, SamplingParams):
            return
        if params.num_logprobs is not None:
            for seq in request.sequences:
                seq.logprobs = [None] * len(seq.output_token_ids)  # of those that were made elsewhere, others have them
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)
            request.sequences[0].reads_cache = False  # it is computed from its first token on
        self._num_running += sum(map(self.concerns, request.sequences))
        self.is_idle = not self._num_running

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        if step.is_dropped or isinstance(result, BaseException):
            return
        for place, entries in result.extras.get(PROMPT_LOGPROBS, ()):
            seq, start = step.runs[place], step.plan.runs[place].start + 1
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
                # Samples in their order: those behind the last token of a sequence were rejected, or came after its end.
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
        self._num_left, asked = MOST_TOLD, []
        for place, (seq, run) in enumerate(zip(step.runs, step.plan.runs, strict=True)):
            known, params = seq.request.prompt_logprobs, seq.params
            if known is None or seq.index or not isinstance(params, SamplingParams):
                continue
            count = min(run.num_new, seq.num_prompt_tokens - 1 - run.start)
            if count > 0 and known[run.start + count] is None:
                asked.append((place, count, params.prompt_logprobs))
        if asked:
            step.plan.extras[PROMPT_LOGPROBS] = asked
            step.plan.needs_hidden = True
