"""LLMEngine: the loop. Each step schedules a batch, launches it, takes the results of the oldest and turns them into text.

With two steps in flight the device never waits for Python: while it computes one batch, the next one is scheduled and launched,
and the texts of the one before are made.

It knows requests and text on the one side and two messages on the other; tensors are the executor's business.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from nanoengine.engine.beam_search import BeamRequest, BeamSearch, num_candidates
from nanoengine.engine.detokenizer import Detokenizer
from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.pipeline import Executor, Pipeline
from nanoengine.engine.request import Completion, Request
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.engine.stats import EngineStats
from nanoengine.errors import EngineClosed, InvalidPrompt, InvalidRequest, InvalidSamplingParams
from nanoengine.outputs import FinishReason
from nanoengine.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer: text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Seq[int]) -> str: ...


class LLMEngine:
    """Continuous batching over one executor. Not thread-safe: one thread adds requests and steps.

    Args:
        scheduler: decides each batch; holds the KV pool's bookkeeping.
        executor: computes the batches.
        tokenizer: text to ids and back.
        vocab_size: prompt token ids are below it.
        eos_token_ids: tokens that end a sequence, unless its params ignore them.
        seed: where the seeds of requests without one come from.
        stats: counted on; None begins anew.
        max_steps_in_flight: 1: the results of a step are taken before the next is scheduled; 2: one step later. While beams run,
            which are chosen by their results, it is 1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Seq[int] = (),
        seed: int = 0,
        stats: EngineStats | None = None,
        clock: Callable[[], float] = perf_counter,
        max_steps_in_flight: int = 1,
    ):
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.stats = EngineStats() if stats is None else stats
        self.clock = clock
        self.max_steps_in_flight = max_steps_in_flight
        self._pipeline = Pipeline(clock)
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, tuple[Request, Completion]] = {}  # seq_id -> whose it is
        self._num_requests = 0
        self._num_beam_requests = 0  # of those that are running
        self._num_sequences = 0
        self._closed = False

    # ---- requests

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def make_request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
    ) -> Request:
        """Check a prompt and its params and make a request of them; nothing runs before `submit`.

        Cached prefixes are shared only among requests of equal `cache_salt`, a string of printable characters.

        Raises:
            InvalidPrompt: empty, too long for `max_model_len`, or token ids outside the vocabulary.
            InvalidSamplingParams: token ids outside the vocabulary among the params.
        """
        self._check_open()
        if not isinstance(cache_salt, str) or not cache_salt.isprintable():
            raise InvalidRequest(f"cache_salt is {cache_salt!r}: it must be a string of printable characters")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidSamplingParams(f"sampling_params must be SamplingParams, not {params!r}")
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise InvalidSamplingParams(
                    f"stop_token_ids holds {token}: the vocabulary ends at {self.vocab_size - 1}"
                )
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._prompt_token_ids(prompt)

        if request_id is None:
            while f"request-{self._num_requests}" in self._requests:  # a caller may have taken that name
                self._num_requests += 1
            request_id = f"request-{self._num_requests}"
            self._num_requests += 1
        return Request(request_id, text, token_ids, params, cache_salt=cache_salt)

    def make_beam_request(self, prompt: str | Seq[int], params: BeamSearchParams) -> BeamRequest:
        """A request for beam search.

        Raises:
            InvalidPrompt: as `make_request`.
            InvalidSamplingParams: the engine cannot run so many beams of this length at once.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidSamplingParams(f"params must be BeamSearchParams, not {params!r}")
        width = params.beam_width
        eos = () if params.ignore_eos else self.eos_token_ids
        candidates = num_candidates(params, eos)
        if candidates > MAX_LOGPROBS:
            raise InvalidSamplingParams(
                f"beam_width is {width}: its {candidates} candidates a step (beams x (1 + end-of-text tokens), at least 2 a beam)"
                f" are more than {MAX_LOGPROBS}: lower it"
            )
        if width > self.scheduler.max_num_seqs:
            raise InvalidSamplingParams(
                f"beam_width is {width}, but max_num_seqs is {self.scheduler.max_num_seqs}: raise it"
            )
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, n=width, logprobs=candidates)
        request = self.make_request(prompt, sampling)
        length = min(len(request.prompt_token_ids) + params.max_tokens, self.scheduler.max_model_len)
        manager = self.scheduler.block_manager
        if width * manager.blocks_for(length) > manager.pool.num_blocks:
            raise InvalidSamplingParams(
                f"{width} beams of {length} tokens take {width * manager.blocks_for(length)} blocks, but the KV pool has "
                f"{manager.pool.num_blocks}: lower beam_width or max_tokens, or raise num_kv_blocks or kv_cache_memory"
            )
        search = BeamSearch(params, eos, length - len(request.prompt_token_ids))
        return BeamRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            params=sampling,
            search=search,
            decode=self.tokenizer.decode,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; `step` works on it from now on.

        Raises:
            InvalidRequest: a request of this id is running, or this one was submitted before.
        """
        self._check_open()
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use: choose another, or abort that request first"
            )
        if request.completions:
            raise InvalidRequest(f"request {request.request_id!r} was submitted before: make a new one")
        with InterruptGuard():
            seed = self._seeds.getrandbits(63) if request.params.seed is None else request.params.seed
            request.arrival_time = self.clock()
            self._requests[request.request_id] = request
            self._num_beam_requests += isinstance(request, BeamRequest)
            first: Sequence | None = None
            for index in range(request.params.num_sequences):
                seq = Sequence(
                    self._num_sequences,
                    request.prompt_token_ids,
                    request.params,
                    index=index,
                    seed=seed,
                    eos_token_ids=self.eos_token_ids,
                    cache_salt=request.cache_salt,
                    fork_of=first,
                )
                first = first or seq
                self._num_sequences += 1
                completion = Completion(seq, Detokenizer(self.tokenizer.decode, request.params.stop))
                request.completions.append(completion)
                self._owner[seq.seq_id] = (request, completion)
                self.scheduler.add(seq)

    def add_request(
        self, prompt: str | Seq[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> Request:
        """`make_request` and `submit` in one."""
        request = self.make_request(prompt, params, request_id)
        self.submit(request)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands and take its blocks back; False if no such request is running."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        with InterruptGuard() as guard:
            self._end(request, "abort")
            self._settle_if_idle(guard)
        return True

    # ---- the loop

    def step(self) -> list[Request]:
        """Launch what may be launched, and take the results of the oldest batch; returns the requests that advanced, ended or
        failed in it.

        An exception while a batch executes ends the requests of that batch (finish reason "error", the exception in
        `Request.error`), gives their blocks back and leaves the engine usable. An idle engine has nothing in flight.
        """
        self._check_open()
        with InterruptGuard() as guard:
            self._launch(guard)
            touched = self._collect(guard) if self._pipeline else []
            self._settle_if_idle(guard)
            return touched

    def _launch(self, guard: InterruptGuard) -> None:
        """Fill the pipeline."""
        depth = 1 if self._num_beam_requests else self.max_steps_in_flight
        while len(self._pipeline) < depth and (batch := self.scheduler.schedule()):
            try:
                self._pipeline.launch(self.executor, batch, guard)
            except BaseException:
                self._drop_all()
                raise

    def _collect(self, guard: InterruptGuard) -> list[Request]:
        """Take the results of the oldest batch in flight."""
        try:
            outcome = self._pipeline.take(guard)
        except BaseException:
            self._drop_all()
            raise
        if isinstance(outcome.result, Exception):
            return self._fail(outcome.result)
        batch, sampled = outcome.batch, outcome.result
        advanced = self.scheduler.update(batch, sampled)
        self.stats.record(batch.phase, len(batch.token_ids), outcome.seconds)
        return self._take_tokens(advanced, outcome.end, sampled.error)

    def _settle_if_idle(self, guard: InterruptGuard) -> None:
        """When all sequences have ended, wait for the steps that were begun before that was known."""
        while self._pipeline and not self.has_unfinished:
            self._collect(guard)

    def _drop_all(self) -> None:
        """After Ctrl-C nobody knows what the batches in flight have written."""
        while self.scheduler.num_in_flight:
            self._fail(RuntimeError("interrupted"))
        self._pipeline.clear()

    def _take_tokens(self, advanced: list[Sequence], now: float, error: Exception | None) -> list[Request]:
        touched: dict[str, Request] = {}
        for seq in advanced:
            request, completion = self._owner[seq.seq_id]
            touched[request.request_id] = request
            if seq.finish_reason == "error":
                request.error = error
                self._retire(completion)
                continue
            if completion.first_token_time is None:
                completion.first_token_time = now
            completion.last_token_time = now
            if isinstance(request, BeamRequest):
                if not seq.finished:
                    self.scheduler.hold(seq)
                continue
            token = seq.token_ids[seq.num_known_tokens - 1]
            if not (seq.finished and token in seq.stop_token_ids):  # a stop token is no text
                match_stop = seq.num_output_tokens >= seq.params.min_tokens
                stop = completion.detokenizer.push(token, match_stop=match_stop)
                if stop is not None:
                    self._stop(seq, stop)
            if seq.finished:
                self._retire(completion)
        for request in touched.values():
            if isinstance(request, BeamRequest):
                self._advance_beams(request)
        return list(touched.values())

    def _advance_beams(self, request: BeamRequest) -> None:
        """When every beam has its next token, let the search choose which go on."""
        seqs = [completion.seq for completion in request.completions]
        if request.error is not None:  # the other beams would wait for that one
            self._end(request, "error")
            return
        if not all(seq.finished or seq in self.scheduler.held for seq in seqs):
            return
        choices = request.search.select([seq.logprobs[-1] for seq in seqs])
        if choices:
            self.scheduler.refork(seqs, choices)
            return
        self._end(request, "stop")

    def _stop(self, seq: Sequence, stop: str) -> None:
        """A stop string wins over a length limit that the same token met."""
        self.scheduler.finish(seq, "stop")
        seq.finish_reason, seq.stop_reason = "stop", stop

    def _fail(self, error: Exception) -> list[Request]:
        _forget_locals(error)
        touched: dict[str, Request] = {}
        for seq in self.scheduler.fail():
            request, completion = self._owner[seq.seq_id]
            request.error = error
            touched[request.request_id] = request
            self._retire(completion)
        for request in touched.values():
            if isinstance(request, BeamRequest):  # the other beams would wait for those that failed
                self._end(request, "error")
        return list(touched.values())

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End all completions of a request that still run."""
        for completion in request.completions:
            self.scheduler.finish(completion.seq, reason)
            self._retire(completion)

    def _retire(self, completion: Completion) -> None:
        """Forget an ended sequence, and its request with the last of them; the caller's Request keeps the result."""
        owner = self._owner.pop(completion.seq.seq_id, None)
        if owner is None:
            return
        completion.detokenizer.finish()
        if owner[0].finished and self._requests.pop(owner[0].request_id, None) is not None:
            # Several completions may end in one step: the first of them finds the request finished.
            self._num_beam_requests -= isinstance(owner[0], BeamRequest)

    # ---- the end

    def close(self) -> None:
        """Abort what runs and give the executor's memory back. Closing twice is allowed."""
        if self._closed:
            return
        with InterruptGuard():
            for request_id in list(self._requests):
                self.abort(request_id)
            self._closed = True
            try:
                farewell = self.scheduler.last_batch()  # what the next process should find on disk
                if farewell.transfers:
                    self.executor.launch(farewell).result()
            finally:
                self.executor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed: make a new one")

    def _prompt_token_ids(self, prompt: str | Seq[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple):
            token_ids = list(prompt)
        else:
            raise InvalidPrompt(f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}")
        if not token_ids:
            raise InvalidPrompt("the prompt is empty: it must have at least one token")
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidPrompt(f"the prompt holds {token!r}: token ids must be integers")
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(f"the prompt holds token id {token}: the vocabulary is 0 to {self.vocab_size - 1}")
        limit = self.scheduler.max_model_len
        if len(token_ids) >= limit:
            raise InvalidPrompt(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is {limit}: "
                f"at most {limit - 1} leave room for a new one; shorten it or raise max_model_len"
            )
        return token_ids


def _forget_locals(error: BaseException) -> None:
    """Whoever keeps the error of a step, or a REPL that does, should not keep the step's tensors."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
