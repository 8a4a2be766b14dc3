"""LLMEngine: the engine loop. Schedule a step, launch it, commit the result of the oldest, detokenize its tokens."""

from __future__ import annotations

import logging
import os
import random
import traceback
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from nanoengine.core.errors import (
    EngineClosed,
    EngineDead,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    PromptTooLong,
    shown,
)
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.core.outputs import FinishReason
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import Faults, call_part
from nanoengine.core.sequence import Request, Sequence
from nanoengine.core.tokenizer import Tokenizer

logger = logging.getLogger("nanoengine")
T = TypeVar("T")


class Executor(Protocol):
    """Computes plans in order, in this process or in another."""

    def launch(self, plan: StepPlan) -> Launched: ...

    def close(self) -> None: ...


class LLMEngine:
    """Continuous batching over one executor. Not thread-safe: one thread submits and steps.

    Args:
        scheduler: decides each step.
        executor: computes it.
        tokenizer: text to token ids and back.
        vocab_size: token ids are below it.
        max_model_len: most tokens of a sequence, its prompt included.
        eos_token_ids: end-of-text tokens.
        depth: steps in flight. 1: a step is committed before the next is scheduled; 2: one step later, so that the device never
            waits.
        seed: of the generator of seeds, for requests without one.
        default_params: of requests without any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Seq[int] = (),
        depth: int = 1,
        seed: int = 0,
        default_params: CoreSamplingParams | None = None,
    ):
        self.scheduler, self.executor, self.tokenizer = scheduler, executor, tokenizer
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, tuple(eos_token_ids)
        self.depth, self.default_params = depth, default_params or CoreSamplingParams()
        self.encode = tokenizer.encode
        self.requests: dict[str, Request] = {}
        self._seeds = random.Random(seed)
        self._request_ids, self._seq_ids = map("request-{}".format, count()), count()
        self._is_closed, self._pid = False, os.getpid()

    # ---- requests

    def make_request(
        self,
        prompt: str | Seq[int],
        params: CoreSamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> Request:
        """Check a prompt and its params, and make a request of them; nothing runs before `submit`.

        Args:
            cache_salt: cached prefixes are shared only among requests of equal salt.
            priority: an integer of 64 bits. A smaller one starts first and is preempted last; equals go by their arrival.
            client: identity of the caller, for fairness.

        Raises:
            InvalidPrompt: empty, too long for `max_model_len`, or token ids outside the vocabulary.
            InvalidSamplingParams: params that the model cannot satisfy.
            InvalidRequest: another argument is bad.
        """
        self._check_open()
        if request_id is None:
            request_id = next(name for name in self._request_ids if name not in self.requests)
        for name, value in (("request_id", request_id), ("cache_salt", cache_salt), ("client", client)):
            if not isinstance(value, str) or not value.isprintable():
                raise InvalidRequest(name, f" is {shown(value)}: it must be a string of printable characters")
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise InvalidRequest("priority", f" is {shown(priority)}: it must be an integer of 64 bits")
        params = self.default_params if params is None else params
        if not isinstance(params, CoreSamplingParams):
            raise InvalidSamplingParams("sampling_params", f" must be SamplingParams, not {shown(params)}")
        params = params.for_model(self)
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, self._check_prompt(prompt), params, cache_salt, priority, client)
        for part in self.scheduler.parts.copy():
            part.made(request)
        return request

    def _check_prompt(self, prompt: str | Seq[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.encode(prompt)
        elif isinstance(prompt, list | tuple):
            token_ids = list(prompt)
        else:
            raise InvalidPrompt(f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}")
        if not token_ids:
            raise InvalidPrompt("the prompt is empty: it must have at least one token")
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidPrompt(f"the prompt holds {shown(token)}: token ids are from 0 to {self.vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt is too long: this model's maximum context length is {self.max_model_len} tokens, and it has "
                f"{len(token_ids)}: {self.max_model_len - 1} leave room for a new one; shorten it or raise max_model_len"
            )
        return token_ids

    def submit(self, request: Request) -> None:
        """Queue a request; `step` works on it from now on.

        Raises:
            InvalidRequest: a request of this id is running, or this one was submitted before.
        """
        self.queue(request)
        for part in self.scheduler.parts.copy():
            part.submitted(request)

    def queue(self, request: Request) -> None:
        """As `submit`, without a call of the parts."""
        self._check_open()
        if request.request_id in self.requests or request.sequences:
            raise InvalidRequest("request_id", f" {shown(request.request_id)} is in use or was submitted: make another")
        params = request.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        self.requests[request.request_id] = request
        for index in request.completions or range(params.num_sequences):
            seq = Sequence(next(self._seq_ids), request, index, seed, self.eos_token_ids, self.max_model_len)
            seq.detokenizer = params.new_detokenizer(self.tokenizer.decode, request.prompt_token_ids)
            request.sequences.append(seq)
            self.scheduler.add(seq)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request, waiting or running; False if there is no such request."""
        if (request := self.requests.get(request_id)) is None:
            return False
        for seq in [seq for seq in request.sequences if not seq.finished]:
            self.scheduler.finish(seq, reason)
            self._make_text(seq)
        self._settle_if_idle()
        return True

    # ---- the loop

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[Request]:
        """Launch steps up to `depth`, and commit the result of the oldest; returns the requests that advanced or ended.

        An exception while a step is computed ends the requests of that step (finish reason "error", the exception in
        `Request.error`); all others resume from their tokens. `EngineDead` ends none: it is raised.
        """
        self._check_open()
        while len(self.scheduler.in_flight) < self.depth and (step := self.scheduler.schedule()):
            step.launched = self._try(partial(self.executor.launch, step.plan))
        seqs = self._collect() if self.scheduler.in_flight else []
        self._settle_if_idle()
        return list(dict.fromkeys(map(attrgetter("request"), seqs)))

    def _collect(self) -> list[Sequence]:
        """Commit the result of the oldest step in flight."""
        step: Step = self.scheduler.in_flight[0]
        made = (*step.decodes, *step.runs, *step.started) if step.faults and not step.is_dropped else ()
        ended = self._end_blamed(step.faults, [seq for seq in made if not seq.finished])
        result = step.launched if isinstance(step.launched, Exception) else self._try(step.launched)
        if isinstance(result, Exception) and not (step.is_dropped or step.decodes or step.runs):
            logger.error("a step that computes nothing has failed: its orders were not carried out", exc_info=result)
        seqs = self.scheduler.fail(result) if isinstance(result, Exception) else self.scheduler.commit(result)
        seqs = ended + seqs
        self._notify("after_step", seqs, step, result, seqs)
        if isinstance(result, Exception):
            _forget_locals(result)
        for seq in seqs:
            if seq.finish_reason or len(seq.token_ids) >= seq.detokenizer.due:
                self._make_text(seq)
        return seqs

    def _try(self, work: Callable[[], T]) -> T | Exception:
        """The result of a call, or its exception. A lost executor and Ctrl-C drop all steps in flight: all sequences resume."""
        try:
            return work()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, EngineDead):
                return error
            while self.scheduler.in_flight:
                step = self.scheduler.in_flight[0]
                self.scheduler.fail(None)
                self._notify("after_step", (), step, error, [])
            raise

    def _make_text(self, seq: Sequence) -> None:
        """Detokenize the new tokens of a sequence, and complete an ended one. A stop string replaces the finish reason."""
        request, detokenizer = seq.request, seq.detokenizer
        try:
            if (stop := detokenizer.read(seq.token_ids, seq.stop_token_ids)) is not None:
                # Tokens behind the stop came in the same step, from drafts: without drafts they would not be there.
                del seq.token_ids[detokenizer.num_tokens :]
                self.scheduler.finish(seq, "stop")
                seq.finish_reason, seq.stop_reason = "stop", stop
            if seq.finished:
                detokenizer.finish()
        except Exception as error:  # of the tokenizer: it concerns this sequence alone
            self.scheduler.finish(seq, "error", error)
        if seq.finished:
            request.error = request.error or seq.error
            request.num_finished += 1
            if request.finished:
                self.requests.pop(request.request_id, None)
            self._notify("finished", (), seq)

    def _notify(self, method: str, seqs: Seq[Sequence], *args: Any) -> None:
        """Call a method of all parts; if a part raises, the sequences among `seqs` end that it concerns."""
        faults: Faults = []
        for part in self.scheduler.parts.copy():
            if not part.is_idle or method == "close":
                call_part(faults, part, method, None, *args)
        self._end_blamed(faults, seqs)

    def _end_blamed(self, faults: Faults, seqs: Iterable[Sequence]) -> list[Sequence]:
        """End the sequences that parts at fault concern; returns these sequences."""
        ended = {seq: error for part, error in faults for seq in seqs if call_part([], part, "concerns", True, seq)}
        for seq, error in ended.items():
            self.scheduler.finish(seq, "error", error)
        return list(ended)

    def _settle_if_idle(self) -> None:
        """When all sequences have ended, wait for the steps that were launched before."""
        while self.scheduler.in_flight and not self.has_unfinished:
            self._collect()

    # ---- the end

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; refused (False) while any request runs."""
        if self.has_unfinished or not self.scheduler.blocks.reset():
            return False
        self.step()  # stores may have copies or deletions to carry out
        return True

    def close(self) -> None:
        """Abort all requests and free the executor's memory. Closing twice is allowed."""
        if self._is_closed or os.getpid() != self._pid:  # a fork has none of its threads
            return
        try:
            for request_id in list(self.requests):
                self.abort(request_id)
            self.scheduler.blocks.call_stores("closing")
            self.step()
        finally:
            self._is_closed = True
            self._notify("close", ())
            self.executor.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed: make a new one")
        if os.getpid() != self._pid:
            raise EngineClosed(
                f"the engine was made in process {self._pid}, whose threads a fork does not have: make one here, which has one "
                'thread, or start processes with multiprocessing\'s "spawn"'
            )


def _forget_locals(error: BaseException) -> None:
    """Clear the frames of an error, so that a reference to it, such as a REPL's, does not hold the tensors of the step."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
