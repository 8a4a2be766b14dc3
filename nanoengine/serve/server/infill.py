"""POST /infill: the text between a prefix and a suffix, as editors ask llama.cpp's server for it
(https://github.com/ggml-org/llama.cpp/tree/master/tools/server, "POST /infill").
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.serve.server.answers import EventStream, encode
from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.fields import with_fields
from nanoengine.serve.server.local_sampling import LocalSampling
from nanoengine.serve.server.protocol import ChatRequest, Table
from nanoengine.serve.server.replies import Usage, Writer, reply
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.serving import Serving

IGNORED = (
    *("cache_prompt", "id_slot", "n_keep", "n_indent", "n_cache_reuse", "samplers", "response_fields", "return_tokens"),
    *("t_max_prompt_ms", "t_max_predict_ms", "timings_per_token", "post_sampling_probs", "lora"),
)
"""Hints about the cache and the time of another server."""

STOP_TYPES = {"length": "limit", "stop": "eos"}


class File(msgspec.Struct):
    """Another file, as context."""

    text: str
    filename: str = ""


class InfillRequest(with_fields(LocalSampling, IGNORED), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /infill. `prompt` is the beginning of the middle."""

    model: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Meta(max_length=256)] | None = None
    prompt: str | None = None
    n_predict: int | None = None
    stream: bool | None = False


async def infill(http: HTTPRequest, serving: Serving) -> Response | EventStream:
    """Fill in the middle. With n_predict 0 the prompt is computed for the prefix cache, and the answer is empty."""
    request = await serving.read(http, InfillRequest)
    marks, limit = serving.prompts.fill_marks, request.n_predict
    files = [(own.filename, own.text) for own in request.input_extra or ()]
    text = marks.prompt(request.input_prefix, request.input_suffix, files) + (request.prompt or "")
    asked = ChatRequest(
        model=request.model,
        messages=[{"role": "user", "content": ""}],
        stream=bool(request.stream),
        max_tokens=None if limit is None or limit < 0 else max(1, limit),
        stop_token_ids=list(marks.ends),
        add_special_tokens=True,
        **request.of_chat(),
    )
    writer = InfillWriter(serving.names.answered(request.model), is_silent=limit == 0)
    return await reply(http, serving, asked, new_id("infill-", http, None), writer, text)


class InfillWriter(Writer):
    """One answer. Arguments: the client's name of the model, and whether the answer stays empty."""

    names = MappingProxyType({"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"})

    def __init__(self, model: str, is_silent: bool):
        super().__init__()
        self._model, self._is_silent = model, is_silent
        self._content: list[str] = []
        self._last: Table = {}
        self._start = time.monotonic()
        self._first = 0.0  # the time of the first token

    def write(self, event: Table) -> bytes:
        return b"data: " + encode(event) + b"\n\n"

    def add(self, text: str) -> Iterator[Table]:
        self._first = self._first or time.monotonic()
        if not self._is_silent:
            self._content.append(text)
            yield {"index": 0, "content": text, "stop": False}

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterator[Table]:
        end = time.monotonic()
        first = self._first or end if self.ttft is None else self._start + self.ttft
        new = 0 if self._is_silent else usage.new
        word = stop if isinstance(stop, str) else ""
        self._last = {
            "index": 0,
            "content": "",
            "stop": True,
            "model": self._model,
            "stop_type": "word" if word else STOP_TYPES.get(reason or "", "none"),
            "stopping_word": word,
            "truncated": False,
            "tokens_predicted": new,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "timings": {
                "cache_n": usage.cached,
                **_speed("prompt", usage.prompt - usage.cached, first - self._start),
                **_speed("predicted", new, end - first),
            },
        }
        yield self._last

    def failed(self, problem: Problem) -> bytes:
        return b"error: " + encode(problem.table()["error"]) + b"\n\n"

    def body(self) -> Table:
        return {**self._last, "content": "".join(self._content)}


def _speed(name: str, num_tokens: int, seconds: float) -> Table:
    """Tokens, milliseconds, and tokens a second."""
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_second": round(num_tokens / max(seconds, 1e-6), 3),
    }
