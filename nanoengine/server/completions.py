"""POST /v1/completions: one or more prompts, as text or as tokens, and what comes behind them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.aio.request_stream import Delta
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.sampling.token_logprobs import TokenLogprobs
from nanoengine.server.answers import EventStream, json_response
from nanoengine.server.errors import Problem
from nanoengine.server.jobs import Job
from nanoengine.server.logprobs import LogprobShapes, Progress
from nanoengine.server.params import MANY, sampling_params
from nanoengine.server.protocol import CompletionRequest
from nanoengine.server.serving import FEW, Serving, new_id
from nanoengine.server.sse import Chunks, encode, usage_json

REST = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}'
"""Of a choice that has nothing but text."""


async def completions(http: HTTPRequest) -> Response | EventStream:
    """Complete prompts; index i of the answer belongs to prompt i // n."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, CompletionRequest)
    prompts = _prompts(request, serving)
    is_echo_only = bool(request.echo) and request.max_tokens == 0
    make = partial(
        sampling_params,
        defaults=serving.defaults,
        max_model_len=serving.max_model_len,
        max_tokens=1 if is_echo_only else 16 if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    params = await serving.make(make, request, slow=len(request.allowed_token_ids or ()) > MANY)
    add_special_tokens = request.add_special_tokens is not False
    answer = _Answer(serving, request, new_id("cmpl", http, request.request_id), is_echo_only)

    def tokens() -> list[list[int]]:
        encoded = [
            serving.encode(prompt, request, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        if request.echo and not request.return_token_ids:
            answer.echoes = [
                prompt if isinstance(prompt, str) else serving.tokenizer.decode(ids, skip_special_tokens=False)
                for prompt, ids in zip(prompts, encoded, strict=True)
            ]
        return encoded

    job = await serving.start(http, answer.job_id, request, params, len(prompts), tokens)
    answer.num_prompt_tokens = [len(made.prompt_token_ids) for made in job.requests]
    if request.stream:
        return EventStream(serving, job, answer.events(job))
    async with serving.jobs.running(job, http.receive, serving.config.request_timeout):
        await job.end()
    is_long = len(job.requests) * params.num_sequences > FEW or params.prompt_logprobs is not None
    return json_response(await serving.make(answer.body, job.requests, slow=is_long or request.logprobs is not None))


def _prompts(request: CompletionRequest, serving: Serving) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) > serving.config.max_prompts and not isinstance(prompt[0], int):
        limit = serving.config.max_prompts
        raise Problem(400, f"prompt has {len(prompt)} prompts: this server allows {limit} (max_prompts)", "prompt")
    if prompt is None or prompt == "":
        raise Problem(400, "prompt is missing or empty: give text or token ids", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if not kinds or int in kinds or [] in prompt:
        raise Problem(400, "prompt must be text, a list of token ids, or a list of such; none of them empty", "prompt")
    return cast(list[str | list[int]], prompt)


@dataclass(slots=True)
class _Answer:
    """Makes one answer, whole or in chunks."""

    serving: Serving
    request: CompletionRequest
    job_id: str
    is_echo_only: bool  # the prompt is all that is wanted; one token is computed, and thrown away
    created: int = field(default_factory=lambda: int(time.time()))
    echoes: list[str] = field(default_factory=list)  # of each prompt; none if they are not wanted
    num_prompt_tokens: list[int] = field(default_factory=list)
    shapes: LogprobShapes = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = LogprobShapes(self.serving.token_texts, bool(self.request.return_tokens_as_token_ids))

    # ---- whole

    def body(self, requests: list[Request]) -> bytes:
        outputs = [request.output() for request in requests]
        choices = [
            self._choice(number, output, index)
            for number, output in enumerate(outputs)
            for index in range(len(output.outputs))
        ]
        num_prompt = sum(self.num_prompt_tokens)
        num_new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return encode(
            {
                "id": self.job_id,
                "object": "text_completion",
                "created": self.created,
                "model": self.serving.name,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self.serving.fingerprint,
                "usage": self.serving.usage(num_prompt, num_new, sum(o.num_cached_tokens for o in outputs)),
            }
        )

    def _choice(self, number: int, output: RequestOutput, index: int) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        text = "" if self.is_echo_only else completion.text
        token_ids, entries = completion.token_ids, completion.logprobs
        logprobs = None
        if entries is not None:
            shown = [] if self.is_echo_only else token_ids
            logprobs = self._logprobs(output.prompt_token_ids, output.prompt_logprobs, shown, entries)
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = self.shapes.prompt(output.prompt_token_ids, output.prompt_logprobs)
        return {
            "index": number * len(output.outputs) + index,
            "text": (self.echoes[number] if self.echoes else "") + text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": token_ids if request.return_token_ids else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs,
        }

    def _logprobs(
        self,
        prompt: list[int],
        of_prompt: list[TokenLogprobs | None] | None,
        token_ids: list[int],
        entries: list[TokenLogprobs],
    ) -> dict[str, Any]:
        """Of a completion from its start, behind those of its prompt if that is repeated."""
        all_ids, all_entries = token_ids, list[TokenLogprobs | None](entries[: len(token_ids)])
        if self.request.echo:
            all_ids, all_entries = [*prompt, *token_ids], [*(of_prompt or ()), *all_entries]
        return self.shapes.completion(all_ids, all_entries, self.request.logprobs or 0)

    # ---- in chunks

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """The chunks, all that are there at a time in one piece."""
        serving, request, n = self.serving, self.request, self.request.n or 1
        common = {"id": self.job_id, "object": "text_completion", "created": self.created, "model": serving.name}
        chunks = Chunks(common, serving.fingerprint)
        options = request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        each = with_usage and options is not None and bool(options.continuous_usage_stats)
        choices = [Progress() for _ in range(n * len(job.requests))]
        is_plain = request.logprobs is None and not request.return_token_ids
        async for news in job.deltas():
            parts = []
            for number, delta in news:
                index = number * n + delta.index
                progress = choices[index]
                is_first = progress.num_tokens == 0
                if is_plain and delta.finish_reason is None and not (is_first and self.echoes):
                    choice = b'{"index":%d,"text":' % index + encode(delta.text) + REST
                else:
                    is_long = is_first and bool(request.echo)
                    make = partial(self._delta, job.requests[number], index, delta)
                    choice = encode(await serving.make(make, progress, slow=is_long))
                progress.advance(delta.token_ids)
                rest = b""
                if each:
                    rest = b',"usage":' + usage_json(self.num_prompt_tokens[number], progress.num_tokens)
                is_last = delta.finish_reason is not None and not with_usage
                parts.append(chunks.last(choice, rest) if is_last else chunks.chunk(choice, rest))
            yield b"".join(parts)
        if with_usage:
            num_new = sum(progress.num_tokens for progress in choices)
            yield chunks.usage(encode(serving.usage(sum(self.num_prompt_tokens), num_new, job.num_cached_tokens)))

    def _delta(self, own: Request, index: int, delta: Delta, progress: Progress) -> dict[str, Any]:
        """A choice with more than text."""
        request, is_first = self.request, progress.num_tokens == 0
        text = "" if self.is_echo_only else delta.text
        if is_first and self.echoes:
            text = self.echoes[index // (request.n or 1)] + text
        logprobs = None
        if delta.logprobs is not None:
            token_ids = [] if self.is_echo_only else delta.token_ids
            if is_first and request.echo:
                logprobs = self._logprobs(own.prompt_token_ids, own.prompt_logprobs, token_ids, delta.logprobs)
            else:
                entries = delta.logprobs[: len(token_ids)]
                logprobs = self.shapes.completion(
                    token_ids, entries, request.logprobs or 0, progress.num_chars, progress.last
                )
            progress.num_chars += sum(map(len, logprobs["tokens"]))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": own.prompt_token_ids if is_first and request.return_token_ids else None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
