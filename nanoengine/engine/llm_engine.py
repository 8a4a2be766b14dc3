"""LLMEngine: the loop. Each step schedules a plan, launches it, takes the results of the oldest and turns them into text.

With two steps in flight the device never waits for Python: while it carries out one plan, the next one is made and launched,
and the texts of the one before are made.

It knows requests and text on the one side and two messages on the other; tensors are the executor's business.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from time import perf_counter

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.engine.beam_search import BeamRequest
from nanoengine.engine.door import Door, Tokenizer
from nanoengine.engine.executor import Executor
from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.kv.announcer import KVAnnouncer
from nanoengine.engine.kv.events import KVEvent
from nanoengine.engine.metrics import EngineMetrics, EngineStats, take_snapshot
from nanoengine.engine.pipeline import Pipeline
from nanoengine.engine.request import Completion, Request
from nanoengine.engine.request_times import RequestTimes
from nanoengine.engine.scheduler import Advanced, Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.errors import EngineClosed, InvalidRequest
from nanoengine.outputs import FinishReason
from nanoengine.sampling_params import BeamSearchParams, SamplingParams


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
        self._door = Door(scheduler, tokenizer, vocab_size, self.eos_token_ids)
        self._pipeline = Pipeline(clock)
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, tuple[Request, Completion]] = {}  # seq_id -> whose it is
        self._num_requests = 0
        self.num_requests = 0
        self._num_beam_requests = 0  # of those that are running
        self._num_sequences = 0
        self._closed = False
        self._finished: Counter[FinishReason] = Counter()
        self._times = RequestTimes(scheduler.max_model_len)
        self._announcer = KVAnnouncer(scheduler.block_manager)

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
        priority: int = 0,
        client: str = "",
    ) -> Request:
        """Check a prompt and its params and make a request of them; nothing runs before `submit`.

        Args:
            cache_salt: cached prefixes are shared only among requests of equal salt, a string of printable characters.
            priority: an integer of 64 bits. Whose is smaller starts first, and gives way last; equals go by their arrival. No
                request that runs gives way to one that waits.
            client: who asks, a string of printable characters. Nobody takes more than a share of a step while others ask too.

        Raises:
            InvalidPrompt: empty, too long for `max_model_len`, or token ids outside the vocabulary.
            InvalidSamplingParams: token ids outside the vocabulary among the params.
            InvalidRequest: another argument is bad.
        """
        self._check_open()
        request_id = self._new_request_id() if request_id is None else request_id
        return self._door.request(request_id, prompt, params, cache_salt, priority, client)

    def make_beam_request(
        self, prompt: str | Seq[int], params: BeamSearchParams, *, priority: int = 0, client: str = ""
    ) -> BeamRequest:
        """A request for beam search.

        Raises:
            InvalidPrompt, InvalidRequest: as `make_request`.
            InvalidSamplingParams: the engine cannot run so many beams of this length at once.
        """
        self._check_open()
        return self._door.beam_request(self._new_request_id(), prompt, params, priority, client)

    def _new_request_id(self) -> str:
        while f"request-{self._num_requests}" in self._requests:  # a caller may have taken that name
            self._num_requests += 1
        self._num_requests += 1
        return f"request-{self._num_requests - 1}"

    def submit(self, request: Request, *, arrival_time: float | None = None) -> None:
        """Queue a request; `step` works on it from now on.

        Args:
            arrival_time: when it came, by the engine's `clock`; its waiting counts from there. None: now.

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
            request.arrival_time = self.clock() if arrival_time is None else arrival_time
            self._requests[request.request_id] = request
            self.num_requests += 1
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
                    bad_words=request.bad_words,
                    in_lockstep=isinstance(request, BeamRequest),
                    priority=request.priority,
                    client=request.client,
                )
                first = first or seq
                self._num_sequences += 1
                completion = Completion(seq, self._detokenizer(request.params))
                request.completions.append(completion)
                self._owner[seq.seq_id] = (request, completion)
                self.scheduler.add(seq)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        decode: Callable[[Seq[int]], str] = self.tokenizer.decode
        if not params.skip_special_tokens:
            decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return Detokenizer(decode, params.stop, include_stop=params.include_stop_str_in_output)

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

    def set_mask(self, request_id: str, mask: bytes | None, index: int = 0) -> None:
        """From its next token on, let one completion of a running request sample only tokens whose bits are set.

        Args:
            mask: bits of the vocabulary, in little-endian words of 32; it holds until it is replaced. None lifts it.

        Raises:
            InvalidRequest: no such completion is running, or the mask has another length.
        """
        request = self._requests.get(request_id)
        if request is None or not 0 <= index < len(request.completions):
            raise InvalidRequest(f"request {request_id!r} has no completion {index} that is running")
        num_bytes = -(-self.vocab_size // 32) * 4
        if mask is not None and len(mask) != num_bytes:
            raise InvalidRequest(f"the mask has {len(mask)} bytes: {self.vocab_size} tokens take {num_bytes}")
        self.scheduler.set_mask(request.completions[index].seq, mask)

    # ---- the loop

    def step(self) -> list[Request]:
        """Launch what may be launched, and take the results of the oldest plan; returns the requests that advanced, ended or
        failed in it.

        An exception while a plan is carried out ends the requests of that step (finish reason "error", the exception in
        `Request.error`), gives their blocks back and leaves the engine usable. An idle engine has nothing in flight.
        """
        self._check_open()
        with InterruptGuard() as guard:
            self._launch(guard)
            touched = self._collect(guard) if self._pipeline else []
            self._settle_if_idle(guard)
            self._announcer.announce()
            return touched

    def _launch(self, guard: InterruptGuard) -> None:
        """Fill the pipeline."""
        depth = 1 if self._num_beam_requests else self.max_steps_in_flight
        while len(self._pipeline) < depth and (plan := self.scheduler.schedule()):
            if self.scheduler.newly_started:
                self._note_start(self.scheduler.newly_started)
            try:
                self._pipeline.launch(self.executor, plan, guard)
            except BaseException:
                self._drop_all()
                raise

    def _note_start(self, seqs: list[Sequence]) -> None:
        now = self.clock()
        for seq in seqs:
            if (owner := self._owner.get(seq.seq_id)) is not None:
                owner[1].scheduled_time = now

    def _collect(self, guard: InterruptGuard) -> list[Request]:
        """Take the results of the oldest plan in flight."""
        try:
            outcome = self._pipeline.take(guard)
        except BaseException:
            self._drop_all()
            raise
        if isinstance(outcome.result, Exception):
            return self._fail(outcome.result)
        plan, result = outcome.plan, outcome.result
        advanced = self.scheduler.update(plan, result)
        self.stats.record(plan, result, outcome.seconds)
        if self.scheduler.drafts is not None:  # what drafts cost follows from that
            self.scheduler.drafts.speculation.note_seconds(plan, outcome.seconds)
        touched, num_taken = self._take_tokens(advanced, outcome.end, result.error)
        self._times.note_step(sum(chunk.num_new for chunk in plan.chunks), num_taken)
        return touched

    def _settle_if_idle(self, guard: InterruptGuard) -> None:
        """When all sequences have ended, wait for the steps that were begun before that was known."""
        while self._pipeline and not self.has_unfinished:
            self._collect(guard)

    def _drop_all(self) -> None:
        """After Ctrl-C nobody knows what the plans in flight have written."""
        while self.scheduler.num_in_flight:
            self._fail(RuntimeError("interrupted"))
        self._pipeline.clear()

    def _take_tokens(self, advanced: Advanced, now: float, error: Exception | None) -> tuple[list[Request], int]:
        """Who got tokens, or an error in their place, and how many they were."""
        touched: dict[str, Request] = {}
        num_dropped = 0
        previous: Sequence | None = None
        note_latency = self._times.inter_token_latency.observe
        for i, (seq, token) in enumerate(zip(*advanced, strict=True), start=1):
            owner = self._owner.get(seq.seq_id)
            if owner is None:  # it was retired a moment ago
                num_dropped += 1
                continue
            request, completion = owner
            touched[request.request_id] = request
            if token < 0:
                num_dropped += 1
                request.error = error
                self._retire(completion)
                continue
            if completion.last_token_time is None:
                completion.first_token_time = now
                self._times.note_first_token(request, seq, now)
            elif seq is not previous:  # those that it gets at once come as one
                note_latency(now - completion.last_token_time)
            completion.last_token_time = now
            previous = seq
            if isinstance(request, BeamRequest):
                if not seq.finished:
                    self.scheduler.hold(seq)
                continue
            completion.num_taken += 1
            is_last = i == len(advanced.seqs) or advanced.seqs[i] is not seq  # of those that it got at once
            is_stop = seq.finished and token in seq.stop_token_ids
            if not is_stop or seq.params.include_stop_str_in_output:
                try:
                    is_last |= self._push(seq, completion, token)
                except Exception as problem:  # the tokenizer's: it is nobody else's
                    for own in request.completions:
                        own.drop_untaken()
                    self._give_up(request, problem)
                    continue
            if seq.finished and is_last:
                self._retire(completion)
        for request in touched.values():
            if isinstance(request, BeamRequest):
                self._advance_beams(request)
        return list(touched.values()), len(advanced.seqs) - num_dropped

    def _push(self, seq: Sequence, completion: Completion, token: int) -> bool:
        """One more token of text; a stop string in it ends the sequence, and wins over a length limit or stop that the token met.

        Returns:
            whether there was one.
        """
        match_stop = completion.num_taken >= seq.params.min_tokens
        stop = completion.detokenizer.push(token, match_stop=match_stop)
        if stop is None:
            return False
        completion.drop_untaken()
        self.scheduler.finish(seq, "stop")
        seq.finish_reason, seq.stop_reason = "stop", stop
        return True

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
        try:
            request.make_texts()
        except Exception as problem:  # the tokenizer's: it is nobody else's
            self._give_up(request, problem)
            return
        self._end(request, "stop")

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

    def _give_up(self, request: Request, error: Exception) -> None:
        """The request cannot go on, and nothing is wrong with its K/V."""
        _forget_locals(error)
        request.error = error
        for completion in request.completions:
            if completion.seq.seq_id in self._owner:  # even if it has all of its tokens: their text is not whole
                completion.seq.finish_reason = "error"
        self._end(request, "error")

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
        request, seq = owner[0], completion.seq
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.speculation.end(seq)
        try:
            completion.detokenizer.finish()
        except Exception as problem:  # the tokenizer's: the text ends before what it could not decode
            request.error = request.error or problem
            seq.finish_reason = "error"
        if seq.finish_reason is not None:
            self._finished[seq.finish_reason] += 1
            if seq.finish_reason != "abort":
                self._times.note_end(request, completion, self.clock())
        request.num_retired += 1
        if request.num_retired == len(request.completions):
            self._times.note_request_end(request)
        if request.finished and self._requests.pop(request.request_id, None) is not None:
            # Several completions may end in one step: the first of them finds the request finished.
            self._num_beam_requests -= isinstance(request, BeamRequest)

    # ---- what others want to know

    def request_of(self, seq: Sequence) -> Request:
        """Whose completion a sequence is that has not ended."""
        return self._owner[seq.seq_id][0]

    def metrics(self) -> EngineMetrics:
        """All counters at this moment."""
        return take_snapshot(
            self.scheduler,
            self.stats,
            self._times,
            self._finished,
            num_requests=self.num_requests,
            num_listener_errors=self._announcer.num_errors,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in every tier; refused (False) while any request runs."""
        done = self.scheduler.block_manager.reset_prefix_cache()
        self._announcer.announce()
        return done

    def listen_to_kv_events(self, listener: Callable[[KVEvent], object] | None) -> None:
        """Call `listener` with all that is cached now, and after each step with what came and went; None ends it.

        What it raises is logged and counted, and changes nothing.
        """
        self._announcer.attach(listener)

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
                farewell = self.scheduler.last_plan()  # what the next process should find on disk
                if farewell:
                    self.executor.launch(farewell).result()
            finally:
                self.executor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed: make a new one")


def _forget_locals(error: BaseException) -> None:
    """Whoever keeps the error of a step, or a REPL that does, should not keep the step's tensors."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
