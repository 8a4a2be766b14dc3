"""`beam_search`: runs the beams of some prompts on an engine.

In each step of a search every beam is a request: the prompt and the tokens of the beam, for one more token, with the
log probabilities of the likeliest ones. The prefix cache has all of it but the last block, so little is computed twice. Beams
need not run at once: they wait, are preempted and resume like any requests.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from nanoengine.core.errors import InvalidSamplingParams, StepFailed, shown
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import CompletionOutput, RequestOutput
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from nanoengine.features.beam_search.beams import Beams, FinishedBeam
from nanoengine.features.beam_search.params import BeamSearchParams


class Search:
    """The beam search of one prompt.

    Args:
        engine: runs its requests.
        prompt: text or token ids.
        params: of the search.
        sampling: the class of a request's params, with a field `logprobs`.
        prepare: called with each request before it is submitted.

    Raises:
        InvalidPrompt, InvalidSamplingParams, InvalidRequest: nothing has run then.
    """

    def __init__(
        self,
        engine: LLMEngine,
        prompt: str | Seq[int],
        params: BeamSearchParams,
        sampling: type[CoreSamplingParams],
        prepare: Callable[[Request], object],
    ):
        if not isinstance(params, BeamSearchParams):
            raise InvalidSamplingParams("params", f" must be BeamSearchParams, not {shown(params)}")
        self.engine, self.prepare = engine, prepare
        self.sampling = sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.error: Exception | None = None
        self.texts: list[str] = []  # of the finished beams
        self.requests: list[Request] = []  # of the step that runs: one for each running beam
        self.beams = Beams(params, engine.eos_token_ids, params.max_tokens)
        # More than the requests of users can ask for, so it does not go through the checks of the params.
        self.sampling.keep("logprobs", self.beams.num_candidates)
        self.first = self._request(prompt)
        self.beams.max_tokens = min(params.max_tokens, engine.max_model_len - len(self.first.prompt_token_ids))

    def _request(self, prompt: str | Seq[int]) -> Request:
        request = self.engine.make_request(prompt, self.sampling)
        self.prepare(request)
        return request

    @property
    def is_over(self) -> bool:
        return self.error is not None or not self.beams.running

    def submit(self, requests: list[Request]) -> None:
        """Run the requests of the next step; the first is `first` alone."""
        self.requests = requests
        for request in requests:
            self.engine.submit(request)

    def advance(self) -> None:
        """If all beams have their next tokens, choose those that go on."""
        if self.is_over or not all(request.finished for request in self.requests):
            return
        seqs = [request.sequences[0] for request in self.requests]
        errors = [seq.error for seq in seqs if seq.error is not None]
        if errors:
            self.error = errors[0]
        elif any(seq.finish_reason == "abort" for seq in seqs):  # by another caller: the finished beams remain
            self.beams.running = []
            self._decode()
        else:
            self.beams.advance([(seq.logprobs or [])[-1] for seq in seqs])
            if self.beams.running:
                prompt = self.first.prompt_token_ids
                self.submit([self._request([*prompt, *beam.token_ids]) for beam in self.beams.running])
            else:
                self._decode()

    def _decode(self) -> None:
        try:
            self.texts = [self._text(beam) for beam in self.beams.finished]
        except Exception as error:  # of the tokenizer: only this search fails
            self.error = error

    def _text(self, beam: FinishedBeam) -> str:
        made = self.sampling.new_detokenizer(self.engine.tokenizer.decode, self.first.prompt_token_ids)
        made.read([*self.first.prompt_token_ids, *beam.token_ids[: len(beam.token_ids) - beam.stopped]])
        made.finish()
        return made.text

    def abort(self) -> None:
        """End its requests."""
        for request in self.requests:
            self.engine.abort(request.request_id)

    def output(self) -> RequestOutput:
        """The finished beams, best first; none if the search has failed."""
        outputs = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=beam.token_ids,
                finish_reason="stop" if beam.stopped else "length",
                stop_reason=None,
                cumulative_logprob=beam.logprob,
            )
            for index, (beam, text) in enumerate(zip(self.beams.finished, self.texts, strict=False))
        ]
        first = self.first
        cached = first.output().num_cached_tokens
        return RequestOutput(first.request_id, first.prompt, first.prompt_token_ids, outputs, cached)


def beam_search(
    engine: LLMEngine,
    prompts: Seq[str | Seq[int]],
    params: BeamSearchParams,
    sampling: type[CoreSamplingParams],
    *,
    after_step: Callable[[list[Search]], object] = lambda _: None,
    prepare: Callable[[Request], object] = lambda _: None,
) -> list[RequestOutput]:
    """Search for the likeliest continuations of prompts, all at once; `outputs` of each result are its beams, best first.

    Args:
        sampling: the class of the requests' params; it has a field `logprobs`.
        after_step: called with all searches after each step of the engine.
        prepare: see `Search`.

    Raises:
        InvalidPrompt, InvalidSamplingParams, InvalidRequest: anything is bad; then nothing has run.
        StepFailed: an exception inside a step; its `outputs` hold the results of the other prompts.
    """
    searches = [Search(engine, prompt, params, sampling, prepare) for prompt in prompts]
    try:
        for search in searches:
            search.submit([search.first])
        while not all(search.is_over for search in searches):
            engine.step()
            for search in searches:
                search.advance()
            after_step(searches)
    finally:  # after Ctrl-C, too
        for search in searches:
            search.abort()
    outputs = [search.output() for search in searches]
    errors = [search.error for search in searches if search.error is not None]
    if errors:
        raise StepFailed(f"{len(errors)} of {len(searches)} requests failed: {errors[0]}", outputs) from errors[0]
    return outputs
