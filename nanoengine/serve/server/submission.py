"""Submission: a request on its way to the engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request as HTTPRequest

from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from nanoengine.serve.server.admission.answer_bytes import answer_bytes
from nanoengine.serve.server.admission.quota import Holding, Quota
from nanoengine.serve.server.bodies.params import truncate
from nanoengine.serve.server.bodies.protocol import Generation, Queued
from nanoengine.serve.server.bodies.structured import named_as_sent
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.scope import ADAPTER, CLIENT, HELD
from nanoengine.serve.server.served_model import ServedModel

Encoding = Generator[None, None, tuple[Sequence[list[int]], CoreSamplingParams]]
"""A generator that returns the token ids of prompts, and how to sample them. One of its steps encodes one long text at most."""

Q = TypeVar("Q", bound=Queued)


class Submission(Generic[Q]):
    """Encodes prompts, checks all limits, and submits the requests to the engine; nothing runs if anything is wrong.

    Args:
        http: the request as it came.
        serving: the served model.
        request: the body.
        job_id: see `Job`.
        params: sampling parameters before the prompt is known: their limits are checked first.

    Attributes:
        prompts: texts and token ids; a conversation has none before it is encoded.
    """

    prompts: Sequence[str | list[int]] = ("",)

    def __init__(self, http: HTTPRequest, serving: ServedModel, request: Q, job_id: str, params: CoreSamplingParams):
        self.http, self.serving, self.request, self.job_id, self.params = http, serving, request, job_id, params
        self.client = http.scope[CLIENT]

    def encode(self) -> Encoding:
        """Its steps run in the threads for text; other clients may run between two of them."""
        return (yield from self.serving.prompts.encode(self.prompts, self.request)), self.params

    def size(self, requests: Sequence[Request]) -> int:
        """The most bytes that the answer takes."""
        return answer_bytes(requests, self.serving.max_model_len)

    async def finish(self) -> Job:
        """As `start`, and wait until the job has ended. Raises as `start` and `Job.end`."""
        job = await self.start()
        async with self.serving.jobs.running(job, self.http.receive):
            await job.end()
        return job

    async def start(self) -> Job:
        """Submit the requests.

        Raises:
            APIError: too many, or no room.
            InvalidPrompt, InvalidSamplingParams, InvalidRequest: see `LLMEngine.make_request`.
        """
        serving, config, request, admission = self.serving, self.serving.config, self.request, self.serving.admission
        for field, value, option in (
            ("stop", len(getattr(self.params, "stop", ())), "max_stop_strings"),
            ("prompt", len(self.prompts), "max_prompts"),
        ):
            if value > (limit := getattr(config, option)):
                raise APIError(400, f"{field} asks for {value}: this server allows {limit} ({option})", field)
        num_sequences = len(self.prompts) * self.params.num_sequences
        num_waiting = serving.engine.num_waiting + admission.num_preparing
        sequences = self._admit(admission.sequences, "max_num_queued_reqs", num_sequences, num_waiting)
        connected = partial(serving.jobs.while_connected, self.http.receive)
        admission.num_preparing += num_sequences
        try:
            with named_as_sent(request):
                requests = await connected(serving.text.finish(self._begin()))
                if not isinstance(requests, list):
                    requests = await connected(serving.grammar_threads.run(self.client, requests))
            sizes = {each: most_tokens(each, serving.max_model_len) for each in requests}
            num_tokens, is_alone = sum(sizes.values()), not serving.engine.num_waiting
            tokens = self._admit(admission.tokens, "max_num_queued_tokens", num_tokens, 0 if is_alone else None)
            self.http.scope[HELD].enter_context(admission.answers.hold(self.client, self.size(requests)))

            def begun(request: Request) -> None:
                """One of its completions waits no more."""
                sequences.release(1)
                tokens.release(sizes[request] // request.params.num_sequences)

            interval = None
            if isinstance(request, Generation) and request.stream:
                interval = max(config.stream_interval, request.stream_interval or 1)
            return Job(self.job_id, serving.engine, requests, interval, begun)
        finally:
            admission.num_preparing -= num_sequences

    def _begin(self) -> Generator[None, None, list[Request] | Callable[[], list[Request]]]:
        """Returns the requests; or a function that makes them, because it may have to compile a grammar."""
        prompts, params = yield from self.encode()
        make = partial(self._make_requests, prompts, params)
        return make() if getattr(params, "structured_outputs", None) is None else make

    def _make_requests(self, prompts: Sequence[list[int]], params: CoreSamplingParams) -> list[Request]:
        serving, request, salt = self.serving, self.request, self.request.cache_salt or ""
        requests = [
            serving.engine.make_request(
                truncate(prompt, request, serving.max_model_len),
                params,
                f"{self.job_id}-{number}-{uuid.uuid4().hex[:8]}",  # clients may repeat an id
                cache_salt=f"{self.client} {salt}" if serving.has_tenants else salt,
                priority=request.priority or 0,
                client=self.client,
            )
            for number, prompt in enumerate(prompts)
        ]
        if (adapter := self.http.scope.get(ADAPTER)) is not None:
            assert serving.adapters is not None
            for each in requests:
                serving.adapters.use(each, adapter)
        return requests

    def _admit(self, quota: Quota, reason: str, size: int, total: int | None) -> Holding:
        """Let the request in, until its answer is sent. `reason`: of the metric. For the rest see `Quota.hold`."""
        self.serving.check_open()
        try:
            return self.http.scope[HELD].enter_context(quota.hold(self.client, size, total))
        except APIError as problem:
            self.serving.admission.num_rejected[reason] += problem.status == 503
            raise


def most_tokens(request: Request, max_model_len: int) -> int:
    """The most tokens of a request: of its prompt and of its completions."""
    num_prompt, params = len(request.prompt_token_ids), request.params
    return params.num_sequences * min(max_model_len, num_prompt + (params.max_tokens or max_model_len))
