"""ServedModel: the state of all endpoints: the engine, its tokenizer, the running jobs, and the limits of requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HTTPRequest

import nanoengine
from nanoengine.builder import Built
from nanoengine.features.observability.view import view_of_engine
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.server.admission.admission import Admission
from nanoengine.serve.server.admission.fair_thread_pool import FairThreadPool
from nanoengine.serve.server.admission.text_threads import TextThreads
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.bodies.params import MANY, sampling_params
from nanoengine.serve.server.bodies.prompts import Prompts
from nanoengine.serve.server.bodies.protocol import Generation
from nanoengine.serve.server.bodies.reading import BodyReader, S
from nanoengine.serve.server.bodies.structured import is_structured, named_as_sent
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import RETRY_AFTER, APIError
from nanoengine.serve.server.jobs import Jobs
from nanoengine.serve.server.metrics import render_metrics
from nanoengine.serve.server.model_card import ModelCard
from nanoengine.serve.server.model_names import ModelNames
from nanoengine.serve.server.scope import ADAPTER
from nanoengine.serve.server.timed_cache import TimedCache
from nanoengine.serve.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters

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
        self.grammar_threads = FairThreadPool(2, 1, self.work_share)
        self.prompts = Prompts(built.tokenizer, config, self.max_model_len)
        self.token_texts = TokenTexts(built.tokenizer)
        self.jobs, self.admission = Jobs(config.request_timeout), Admission(config)
        self._reader = BodyReader(config, self.admission.bodies, self.max_model_len)
        self.metrics_text = TimedCache(self._render_metrics, METRICS_SECONDS)
        self.summed_metrics_text = TimedCache(partial(self._render_metrics, summed=True), METRICS_SECONDS)
        view = getattr(self.metrics, "view", partial(view_of_engine, observer=self.metrics))  # replicas have theirs
        self.view = TimedCache(lambda: self.engine.call(view), VIEW_SECONDS)
        num_keys = len(set(config.api_key or ())) + (config.admin_key is not None)
        self.has_tenants = num_keys > 1 or config.separate_addresses  # without common cached prefixes
        self.is_draining = False  # the server will end when the jobs have
        self.cache_config: dict[str, str] = {}  # options of the K/V cache, as labels of a metric

    async def _render_metrics(self, *, summed: bool = False) -> bytes:
        """All counters between two steps, for Prometheus; in a thread that no text of a client waits for."""
        snapshots = await self.engine.call(partial(self.metrics.snapshots, summed=summed))
        rejected = dict(self.admission.num_rejected)
        render = partial(render_metrics, model_name=self.name, cache_config=self.cache_config, num_rejected=rejected)
        return await asyncio.to_thread(render, snapshots)

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names.of_model[0]

    async def read(self, http: HTTPRequest, kind: type[S]) -> S:
        """The body of a request, for a model that is served here. Raises as `BodyReader.read`."""
        return (await self.read_as(http, kind, lambda _: None))[0]

    async def read_as(self, http: HTTPRequest, kind: type[S], make: Callable[[S], R]) -> tuple[S, R]:
        """As `read`, and the result of a function of the request, which is called in a thread if the body is long."""
        request, made = await self._reader.read(http, kind, make, self.text)
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

    async def make(self, function: Callable[[A], R], value: A, *, slow: bool) -> R:
        """The result of a function of a value; it is called in a thread for text if it is slow."""
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

    async def params(self, request: Generation) -> SamplingParams:
        """The sampling parameters of each prompt. Raises as `sampling_params`."""
        max_model_len, max_n = self.max_model_len, self.config.max_n
        make = partial(sampling_params, defaults=self.defaults, max_model_len=max_model_len, max_n=max_n)
        slow = len(request.allowed_token_ids or ()) > MANY or is_structured(request)
        with named_as_sent(request):
            return await self.make(make, request, slow=slow)

    @cached_property
    def card(self) -> ModelCard:
        return ModelCard.of(self._models)

    def close(self) -> None:
        """End the engine and its threads; waits for the step that runs."""
        self.engine.close()
        self.text.close()
        self.grammar_threads.close()


def short_name(model: str) -> str:
    """The name of a model for clients: the last part of a path, or the name itself."""
    return Path(model).resolve().name if os.path.exists(model) else model
