"""Request: what one caller asked for and what has come of it so far: one sequence and one text per completion."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.engine.sequence import Sequence, Status
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from nanoengine.sampling_params import SamplingParams


@dataclass(slots=True)
class Completion:
    """One completion of a request while it runs. Times are seconds of the engine's clock."""

    seq: Sequence
    detokenizer: Detokenizer
    num_taken: int = 0  # tokens whose text was made, or that have none
    scheduled_time: float | None = None  # when it was first started
    first_token_time: float | None = None
    last_token_time: float | None = None

    def drop_untaken(self) -> None:
        """It ends with the tokens that were taken: without drafts, nobody would have computed those that came with the last."""
        seq = self.seq
        del seq.token_ids[seq.num_prompt_tokens + self.num_taken :], seq.logprobs[self.num_taken :]


@dataclass(slots=True, eq=False)
class Request:
    """The live state of a request. Once it is submitted, callers read it at any time: `finished`, `output()`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float = 0.0  # set, like `completions`, when it is submitted
    completions: list[Completion] = field(default_factory=list)
    error: Exception | None = None  # what a failed step raised
    cache_salt: str = ""
    priority: int = 0  # whose is smaller comes first
    client: str = ""  # who asked
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of `params.bad_words`
    num_retired: int = 0  # completions that the engine has done with

    @property
    def finished(self) -> bool:
        for completion in self.completions:  # a loop and not all(): it is asked of every request in every step
            if completion.seq.status is not Status.FINISHED:
                return False
        return bool(self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had, once it has begun."""
        return self.completions[0].seq.num_cached_tokens or 0

    def output(self) -> RequestOutput:
        """The result so far, as a value that changes no more."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._outputs(),
            num_cached_tokens=self.num_cached_tokens,
            metrics=self._metrics(),
            prompt_logprobs=self.prompt_logprobs(),
        )

    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per prompt token; nothing comes before the first, so it has none."""
        if self.params.prompt_logprobs is None:
            return None
        computed = self.completions[0].seq.prompt_logprobs
        return [None, *computed, *[None] * (len(self.prompt_token_ids) - 1 - len(computed))]

    def _outputs(self) -> list[CompletionOutput]:
        outputs = [self._completion_output(completion) for completion in self.completions]
        if self.params.best_of is not None:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
            outputs = [replace(output, index=rank) for rank, output in enumerate(outputs[: self.params.n])]
        return outputs

    def _completion_output(self, completion: Completion) -> CompletionOutput:
        seq = completion.seq
        token_ids = seq.output_token_ids
        cumulative = None
        if self.params.num_logprobs is not None:
            cumulative = sum(entry[token].logprob for entry, token in zip(seq.logprobs, token_ids, strict=True))
        logprobs = None if self.params.logprobs is None else list(seq.logprobs)
        return CompletionOutput(
            index=seq.index,
            text=completion.detokenizer.text,
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def _metrics(self) -> RequestMetrics:
        started = [c for c in self.completions if c.first_token_time is not None]
        num_preemptions = sum(c.seq.num_preemptions for c in self.completions)
        if not started:
            return RequestMetrics(ttft=None, tpot=None, latency=None, num_preemptions=num_preemptions)
        first = min(c.first_token_time or 0.0 for c in started)
        last = max(c.last_token_time or 0.0 for c in started)
        num_steps = max(c.seq.num_output_tokens for c in started) - 1
        return RequestMetrics(
            ttft=first - self.arrival_time,
            tpot=(last - first) / num_steps if num_steps else None,
            latency=last - self.arrival_time if self.finished else None,
            num_preemptions=num_preemptions,
        )
