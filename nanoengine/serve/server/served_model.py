"""ServedModel: the state of all endpoints: the engine, its tokenizer, the running jobs, and the admission of requests."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HTTPRequest

import nanoengine
from nanoengine.builder import Built
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from nanoengine.features.observability.view import view_of_engine
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.server.admission.fair_thread_pool import FairThreadPool
from nanoengine.serve.server.admission.quota import Holding, Quota
from nanoengine.serve.server.admission.text_threads import TextThreads
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.bodies.fields import Ignored
from nanoengine.serve.server.bodies.params import MANY, sampling_params, truncate
from nanoengine.serve.server.bodies.prompts import Prompts
from nanoengine.serve.server.bodies.protocol import Generation, Queued
from nanoengine.serve.server.bodies.reading import S, check_size, read
from nanoengine.serve.server.bodies.structured import is_structured, named_as_sent
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.serve.server.jobs import Job, Jobs, disconnected, overdue
from nanoengine.serve.server.metrics import render_metrics
from nanoengine.serve.server.model_card import ModelCard
from nanoengine.serve.server.model_names import ModelNames
from nanoengine.serve.server.scope import ADAPTER, CLIENT, HELD
from nanoengine.serve.server.timed_cache import TimedCache
from nanoengine.serve.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters

Encoding = Generator[None, None, tuple[Sequence[list[int]], CoreSamplingParams]]
"""A generator that returns the token ids of prompts, and how to sample them. One of its steps encodes one long text at most."""

A = TypeVar("A")
R = TypeVar("R")

FEW = 8
"""Answers with more completions than this are encoded in a thread for text."""

METRICS_SECONDS = 1.0
"""The age of the metrics in an answer, at most."""

VIEW_SECONDS = 0.1
"""The age of the view that the page shows, at most."""


class ServedModel:
    """One model, served.

    Args:
        build: makes an engine that nobody else uses.
        config: of the server.
        name: the model's name or path; its last part is the name for clients where the config has none.
    """

    def __init__(self, build: Callable[[], Built], config: ServerConfig, name: str):
        self.config = config
        self.engine = AsyncLLMEngine.of(build)
        built = self.engine.built
        self.tokenizer = built.tokenizer
        self.metrics = built.metrics
        self.defaults = built.models.default_sampling
        self._models = built.models
        import torch  # with the engine: a server of several models has none

        self.on_gpu = built.config.device != "cpu" and torch.cuda.is_available()
        self.max_model_len = built.engine.max_model_len
        self.root = name
        lora = built.capabilities.get("lora")
        self.adapters: Adapters | None = None if lora is None else lora.adapters
        self.names = ModelNames(config.served_model_name or (short_name(name),), self.adapters)
        self.created = int(time.time())
        self.fingerprint = f"nanoengine-{nanoengine.__version__}"
        fairness = built.capabilities.get("fairness")
        time_share = None if fairness is None else fairness.time
        self.work_share = WorkShare(spent={} if time_share is None else time_share.accounts.spent)
        self.text = TextThreads(config.text_threads, self.work_share)
        self.grammar_threads = FairThreadPool(2, 1, self.work_share)  # for grammars
        self.prompts = Prompts(built.tokenizer, config, self.max_model_len)
        self.token_texts = TokenTexts(built.tokenizer)
        self.jobs = Jobs()
        self.ignored = Ignored()
        of_bytes, of_positions = Quota.of_bytes, Quota.of_positions
        most, hint = config.max_held_body_bytes, "ask for fewer tokens, log probabilities or completions"
        self.bodies = of_bytes(most, "max_held_body_bytes", "this body may take {}", "shorten it")
        self.answers = of_bytes(config.max_answer_bytes, "max_answer_bytes", "this answer may take {}", hint)
        # Of sequences that have produced no token yet:
        self.sequences = of_positions(max(1, config.max_waiting), "max_waiting", "prompts times n are {}", "sequences")
        needs = "this request may take {}, its prompts and max_tokens times n"
        self.tokens = of_positions(config.max_waiting_tokens, "max_waiting_tokens", needs, "tokens")
        self.metrics_text = TimedCache(self._render_metrics, METRICS_SECONDS)
        self.summed_metrics_text = TimedCache(partial(self._render_metrics, summed=True), METRICS_SECONDS)
        view = getattr(
            self.metrics, "view", partial(view_of_engine, observer=self.metrics)
        )  # replicas tell their views
        self.view = TimedCache(lambda: self.engine.call(view), VIEW_SECONDS)
        self.num_rejected: Counter[str] = Counter()  # by reason
        num_keys = len(set(config.api_key or ())) + (config.admin_key is not None)
        self.has_tenants = num_keys > 1 or config.separate_addresses  # without common cached prefixes
        self.is_draining = False  # the server will end when the jobs have
        self.cache_config: dict[str, str] = {}  # options of the K/V cache, as labels of a metric
        self._num_preparing = 0  # sequences whose text is being encoded

    async def _render_metrics(self, *, summed: bool = False) -> bytes:
        """All counters between two steps, for Prometheus; in a thread that no text of a client waits for."""
        snapshots = await self.engine.call(partial(self.metrics.snapshots, summed=summed))
        return await asyncio.to_thread(
            render_metrics,
            snapshots,
            model_name=self.name,
            cache_config=self.cache_config,
            num_rejected=dict(self.num_rejected),
        )

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names.of_model[0]

    async def read(self, http: HTTPRequest, kind: type[S]) -> S:
        """The body of a request, for a model that is served here. Raises as `reading.read` and `check_size`."""
        return (await self.read_as(http, kind, lambda _: None))[0]

    async def read_as(self, http: HTTPRequest, kind: type[S], make: Callable[[S], R]) -> tuple[S, R]:
        """As `read`, and the result of a function of the request, which is called in a thread if the body is long."""
        config = self.config

        def checked(request: S) -> tuple[S, R]:
            check_size(request, self.max_model_len, config.max_text_chars)
            return request, make(request)

        holding = http.scope[HELD].enter_context(self.bodies.hold(http.scope[CLIENT]))
        request, made = await read(http, kind, self.text, config.max_body_bytes, holding, self.ignored, checked)
        if model := getattr(request, "model", None):
            http.scope[ADAPTER] = self.names.check(model)
        return request, made

    @property
    def closed_because(self) -> str | None:
        """The reason why no requests are served; None: they are."""
        if self.engine.error is not None:
            return f"the engine is dead: {self.engine.error}"
        if (seconds := self.engine.seconds_in_step) > (limit := self.config.max_step_seconds):
            return f"the step that runs has taken {seconds:.0f} s, and {limit:g} are allowed (max_step_seconds)"
        if (reason := getattr(self.engine.engine, "unavailable", None)) is not None:  # of replicas
            return str(reason)
        return "the server is shutting down" if self.is_draining else None

    def check_open(self) -> None:
        """Raise an APIError if no requests are served."""
        if (reason := self.closed_because) is not None:
            raise APIError(503, reason, headers=RETRY_AFTER if self.engine.error is None else None)

    async def start(
        self,
        http: HTTPRequest,
        job_id: str,
        request: Queued,
        params: CoreSamplingParams,
        num_prompts: int,
        encode: Callable[[], Encoding],
        size: Callable[[Sequence[Request]], int],
    ) -> Job:
        """Encode prompts, check all, and submit them; nothing runs if anything is wrong.

        Args:
            http: the request as it came.
            job_id: see `Job`.
            request: its body.
            params: sampling parameters before the prompt is known: their limits are checked first.
            num_prompts: the number of prompts.
            encode: makes the token ids of the prompts and the final sampling parameters; its steps run in the threads for text,
                between the work of other clients.
            size: the most bytes that the answer takes.

        Raises:
            APIError: too many, or no room.
            InvalidPrompt, InvalidSamplingParams, InvalidRequest: see `LLMEngine.make_request`.
        """
        config = self.config
        for field, value, option in (
            ("stop", len(getattr(params, "stop", ())), "max_stop_strings"),
            ("prompt", num_prompts, "max_prompts"),
        ):
            if value > (limit := getattr(config, option)):
                raise APIError(400, f"{field} asks for {value}: this server allows {limit} ({option})", field)
        num_sequences = num_prompts * params.num_sequences
        client, num_waiting = http.scope[CLIENT], self.engine.num_waiting + self._num_preparing
        sequences = self._admit(self.sequences, "max_num_queued_reqs", http, num_sequences, num_waiting)

        def make(prompts: Sequence[list[int]], final_params: CoreSamplingParams) -> list[Request]:
            requests = [
                self.engine.make_request(
                    truncate(prompt, request, self.max_model_len),
                    final_params,
                    f"{job_id}-{number}-{uuid.uuid4().hex[:8]}",  # clients may repeat an id
                    cache_salt=f"{client} {request.cache_salt or ''}" if self.has_tenants else request.cache_salt or "",
                    priority=request.priority or 0,
                    client=client,
                )
                for number, prompt in enumerate(prompts)
            ]
            if (adapter := http.scope.get(ADAPTER)) is not None:
                assert self.adapters is not None
                for each in requests:
                    self.adapters.use(each, adapter)
            return requests

        def begin() -> Generator[None, None, list[Request] | Callable[[], list[Request]]]:
            """The requests; or a function that makes them, because it may have to compile a grammar."""
            prompts, final_params = yield from encode()
            making = partial(make, prompts, final_params)
            return making() if getattr(final_params, "structured_outputs", None) is None else making

        self._num_preparing += num_sequences
        try:
            with named_as_sent(request):
                requests = await self.while_there(http, self.text.finish(begin()))
                if not isinstance(requests, list):
                    requests = await self.while_there(http, self.grammar_threads.run(client, requests))
            sizes = {each: most_tokens(each, self.max_model_len) for each in requests}
            num_tokens, is_alone = sum(sizes.values()), not self.engine.num_waiting
            tokens = self._admit(self.tokens, "max_num_queued_tokens", http, num_tokens, 0 if is_alone else None)
            http.scope[HELD].enter_context(self.answers.hold(client, size(requests)))

            def begun(request: Request) -> None:
                """One of its completions waits no more."""
                sequences.release(1)
                tokens.release(sizes[request] // request.params.num_sequences)

            interval = None
            if isinstance(request, Generation) and request.stream:
                interval = max(config.stream_interval, request.stream_interval or 1)
            return Job(job_id, self.engine, requests, interval, begun)
        finally:
            self._num_preparing -= num_sequences

    def _admit(self, quota: Quota, reason: str, http: HTTPRequest, size: int, total: int | None) -> Holding:
        """Let a request in, until its answer is sent. `reason`: of the metric. Other arguments, and errors: see `Quota.hold`."""
        self.check_open()
        try:
            return http.scope[HELD].enter_context(quota.hold(http.scope[CLIENT], size, total))
        except APIError as problem:
            self.num_rejected[reason] += problem.status == 503
            raise

    async def while_there(self, http: HTTPRequest, work: Coroutine[Any, Any, R]) -> R:
        """The result of some work, which is cancelled when the client hangs up, and after `request_timeout` seconds.

        Raises:
            APIError: the client is gone, or the time is over.
        """
        making, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(http.receive))
        try:
            timeout = self.config.request_timeout
            await asyncio.wait((making, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                return making.result()
            raise APIError(499, "the client is gone") if timeout is None or gone.done() else overdue(timeout)
        finally:
            gone.cancel()
            making.cancel()

    async def make(self, function: Callable[[A], R], value: A, *, slow: bool) -> R:
        """Call a function that makes a part of an answer; in a thread for text if it is slow."""
        return await self.text.run(function, value) if slow else function(value)

    def usage(
        self, num_prompt: int, num_completion: int, num_cached: int, num_thought: int | None = None
    ) -> dict[str, Any]:
        """Tokens in and out, how many of those in were in the prefix cache, and how many of those out were thoughts."""
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_completion,
            "completion_tokens": num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            **({} if num_thought is None else {"completion_tokens_details": {"reasoning_tokens": num_thought}}),
        }

    async def params(self, request: Generation, **values: Any) -> SamplingParams:
        """How to sample each prompt. Arguments and errors as for `sampling_params`."""
        values |= {"max_model_len": self.max_model_len, "max_n": self.config.max_n}
        make = partial(sampling_params, defaults=self.defaults, **values)
        slow = len(request.allowed_token_ids or ()) > MANY or is_structured(request)
        with named_as_sent(request, values.get("names", {})):
            return await self.make(make, request, slow=slow)

    @cached_property
    def card(self) -> ModelCard:
        return ModelCard.of(self._models)

    def close(self) -> None:
        """End the engine and its threads; waits for the step that runs."""
        self.engine.close()
        self.text.close()
        self.grammar_threads.close()


def most_tokens(request: Request, max_model_len: int) -> int:
    """The most tokens of a request: of its prompt and of its completions."""
    num_prompt, params = len(request.prompt_token_ids), request.params
    return params.num_sequences * min(max_model_len, num_prompt + (params.max_tokens or max_model_len))


def short_name(model: str) -> str:
    """What a model is called: a path's last part, or the name itself."""
    return Path(model).resolve().name if os.path.exists(model) else model
