"""POST /v1/chat/completions: a conversation, in the model's chat template, and what the model says next."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.aio.request_stream import Delta
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.server.answers import EventStream, json_response
from nanoengine.server.jobs import Job
from nanoengine.server.logprobs import LogprobShapes, Progress
from nanoengine.server.params import MANY, sampling_params
from nanoengine.server.protocol import ChatRequest
from nanoengine.server.serving import FEW, Serving, new_id
from nanoengine.server.sse import Chunks, encode, usage_json
from nanoengine.server.text import joined

ASSISTANT = "assistant"

REST = b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
"""Of a choice that has nothing but text."""


async def chat_completions(http: HTTPRequest) -> Response | EventStream:
    """Answer a conversation, n times."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, ChatRequest)
    by_new_name = request.max_completion_tokens is not None
    make = partial(
        sampling_params,
        defaults=serving.defaults,
        max_model_len=serving.max_model_len,
        max_tokens=request.max_completion_tokens if by_new_name else request.max_tokens,
        names={"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens" if by_new_name else "max_tokens"},
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    params = await serving.make(make, request, slow=len(request.allowed_token_ids or ()) > MANY)
    answer = _Answer(serving, request, new_id("chatcmpl", http, request.request_id))

    def tokens() -> list[list[int]]:
        answer.prompt = render(serving, request)
        serving.check_length(answer.prompt, request)
        return [serving.chats.encode(answer.prompt, add_special_tokens=bool(request.add_special_tokens))]

    job = await serving.start(http, answer.job_id, request, params, 1, tokens)
    answer.num_prompt_tokens = len(job.requests[0].prompt_token_ids)
    if request.stream:
        return EventStream(serving, job, answer.events(job))
    async with serving.jobs.running(job, http.receive, serving.config.request_timeout):
        await job.end()
    is_long = params.num_sequences > FEW or params.prompt_logprobs is not None
    return json_response(await serving.make(answer.body, job.requests[0], slow=is_long or bool(request.logprobs)))


def render(serving: Serving, request: ChatRequest) -> str:
    """The text that a conversation is to the model."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        kwargs.setdefault("documents", request.documents)
    return serving.chats.render(
        request.messages,
        template_kwargs=kwargs,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


@dataclass(slots=True)
class _Answer:
    """Makes one answer, whole or in chunks."""

    serving: Serving
    request: ChatRequest
    job_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    prompt: str = ""  # as rendered
    num_prompt_tokens: int = 0
    shapes: LogprobShapes = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = LogprobShapes(self.serving.token_texts, bool(self.request.return_tokens_as_token_ids))

    @property
    def role(self) -> str:
        """Of the answer; one that goes on with the last message has that message's."""
        last = self.request.messages[-1].get("role")
        return ASSISTANT if self.request.add_generation_prompt or not isinstance(last, str) else last

    @property
    def echo(self) -> str:
        """What is repeated before the answer: the message that it goes on with."""
        last = joined(self.request.messages[-1])
        content = last.get("content")
        return content if self.request.echo and last.get("role") == self.role and isinstance(content, str) else ""

    # ---- whole

    def body(self, own: Request) -> bytes:
        request, serving, output = self.request, self.serving, own.output()
        num_new = sum(len(completion.token_ids) for completion in output.outputs)
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = self.shapes.prompt(output.prompt_token_ids, output.prompt_logprobs)
        return encode(
            {
                "id": self.job_id,
                "object": "chat.completion",
                "created": self.created,
                "model": serving.name,
                "choices": [self._choice(output, index) for index in range(len(output.outputs))],
                "service_tier": None,
                "system_fingerprint": serving.fingerprint,
                "usage": serving.usage(self.num_prompt_tokens, num_new, output.num_cached_tokens),
                "prompt_logprobs": prompt_logprobs,
                "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
                "prompt_text": self.prompt if request.return_prompt_text else None,
            }
        )

    def _choice(self, output: RequestOutput, index: int) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self.shapes.chat(completion.token_ids, completion.logprobs, request.top_logprobs or 0)
        return {
            "index": index,
            "message": {"role": self.role, "content": self.echo + completion.text, "refusal": None, "reasoning": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
        }

    # ---- in chunks

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """The chunks, all that are there at a time in one piece."""
        serving, request, n = self.serving, self.request, self.request.n or 1
        common = {"id": self.job_id, "object": "chat.completion.chunk", "created": self.created, "model": serving.name}
        chunks = Chunks(common, serving.fingerprint)
        options = request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        each = with_usage and options is not None and bool(options.continuous_usage_stats)
        is_plain = not request.logprobs and not request.return_token_ids
        choices = [Progress() for _ in range(n)]
        begun = False
        async for news in job.deltas():
            parts = [] if begun else self._beginning(job, chunks, n, each)
            begun = True
            for _, delta in news:
                index, progress = delta.index, choices[delta.index]
                num_tokens = progress.num_tokens + len(delta.token_ids)
                rest = b',"usage":' + usage_json(self.num_prompt_tokens, num_tokens) if each else b""
                if is_plain and delta.finish_reason is None:
                    choice = b'{"index":%d,"delta":{"content":' % index + encode(delta.text) + REST
                    parts.append(chunks.chunk(choice, rest))
                elif delta.finish_reason is None or with_usage:
                    parts.append(chunks.chunk(encode(self._delta(delta, progress)), rest))
                else:
                    parts.append(chunks.last(encode(self._delta(delta, progress)), rest))
                progress.advance(delta.token_ids)
            yield b"".join(parts)
        if with_usage:
            num_new = sum(progress.num_tokens for progress in choices)
            yield chunks.usage(encode(serving.usage(self.num_prompt_tokens, num_new, job.num_cached_tokens)))

    def _beginning(self, job: Job, chunks: Chunks, n: int, each: bool) -> list[bytes]:
        """Who speaks, and what is repeated, of every choice."""
        request = self.request
        token_ids = job.requests[0].prompt_token_ids if request.return_token_ids else None
        prompt = self.prompt if request.return_prompt_text else None
        of_prompt = b',"prompt_token_ids":' + encode(token_ids) + b',"prompt_text":' + encode(prompt)
        usage = b',"usage":' + usage_json(self.num_prompt_tokens, 0) if each else b""
        deltas = [({"role": self.role, "content": ""}, of_prompt + usage)]
        if self.echo:
            deltas.append(({"content": self.echo}, usage))
        return [
            chunks.chunk(encode({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}), rest)
            for delta, rest in deltas
            for i in range(n)
        ]

    def _delta(self, delta: Delta, progress: Progress) -> dict[str, Any]:
        """A choice with more than text."""
        request = self.request
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self.shapes.chat(delta.token_ids, delta.logprobs, request.top_logprobs or 0, progress.last)
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        return choice if delta.finish_reason is None else choice | {"stop_reason": delta.stop_reason}
