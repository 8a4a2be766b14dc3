"""llama.cpp's interface, as far as its clients read it: /completion, /infill and /props
(https://github.com/ggml-org/llama.cpp/tree/master/tools/server; Continue, llama.vim and llama.vscode read the answers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.json_response import encode, json_response
from nanoengine.serve.server.apis.local_sampling import OURS, THEIRS, LocalSampling
from nanoengine.serve.server.apis.writer import Usage, Writer, reply
from nanoengine.serve.server.bodies.fields import with_fields
from nanoengine.serve.server.bodies.protocol import Table, TranslatedRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel

IGNORED = (
    *("cache_prompt", "id_slot", "n_keep", "n_indent", "n_cache_reuse", "samplers", "return_tokens"),
    *("t_max_prompt_ms", "t_max_predict_ms", "timings_per_token", "post_sampling_probs", "lora", "n_cmpl"),
)
"""Hints about the cache and the time of another server; n_cmpl is the most alternatives that an editor can show: one comes."""

FieldPath = Annotated[str, Meta(max_length=128)]

STOP_TYPES = {"length": "limit", "stop": "eos"}


class File(msgspec.Struct):
    """Another file, as context."""

    text: str
    filename: str = ""


class LlamaRequest(with_fields(LocalSampling, IGNORED), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /completion, and fields of POST /infill.

    Attributes:
        n_predict: the most new tokens. Below 0: as many as fit. 0: the prompt is computed for the prefix cache alone.
        response_fields: paths such as "timings/prompt_n": a whole answer has these fields alone, by their paths.
    """

    model: str | None = None
    prompt: str | None = None
    n_predict: int | None = None
    stream: bool | None = False
    json_schema: Table | None = None
    grammar: str | None = None
    response_fields: Annotated[list[FieldPath], Meta(max_length=64)] | None = None

    async def answer(
        self, http: HTTPRequest, serving: ServedModel, text: str, ends: list[int]
    ) -> Response | EventStream:
        """Go on with a text, up to one of the tokens `ends`. Raises as `writer.reply`."""
        limit = self.n_predict
        request = TranslatedRequest(
            model=self.model,
            messages=[{"role": "user", "content": ""}],
            stream=bool(self.stream),
            max_tokens=None if limit is None or limit < 0 else max(1, limit),
            stop_token_ids=ends,
            add_special_tokens=True,
            json_schema=self.json_schema,
            grammar=self.grammar,
            names=THEIRS | {"max_tokens": "n_predict", "prompt": "prompt"},
            **self.of_chat(),
        )
        writer = LlamaWriter(serving, self)
        return await reply(http, serving, request, new_id("completion-", http, None), writer, text)


class InfillRequest(LlamaRequest, kw_only=True):  # type: ignore[call-arg]
    """POST /infill. `prompt` is the beginning of the middle."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Meta(max_length=256)] | None = None


async def completion(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Go on with a text."""
    request = await serving.read(http, LlamaRequest)
    if not request.prompt:
        raise APIError(400, "prompt is missing or empty: give a text", "prompt")
    return await request.answer(http, serving, request.prompt, [])


async def infill(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Fill in the middle."""
    request, marks = await serving.read(http, InfillRequest), serving.prompts.fill_tokens
    files = [(file.filename, file.text) for file in request.input_extra or ()]
    text = marks.prompt(request.input_prefix, request.input_suffix, files) + (request.prompt or "")
    return await request.answer(http, serving, text, list(marks.ends))


async def props(_: HTTPRequest, serving: ServedModel) -> Response:
    """The context, the default sampling parameters, the chat template and its marks."""
    info = await serving.text.run(serving.tokenizer.info)
    params = {theirs: serving.defaults[name] for theirs, name in OURS.items() if name in serving.defaults}
    return json_response(
        {
            "default_generation_settings": {"n_ctx": serving.max_model_len, "params": params},
            "model_alias": serving.name,
            "model_path": serving.root,
            "chat_template": info.get("chat_template", ""),
            "bos_token": info.get("bos_token", ""),
            "eos_token": info.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False},
            "build_info": serving.fingerprint,
        }
    )


class LlamaWriter(Writer):
    """One answer to a request. With n_predict 0 it stays empty."""

    def __init__(self, serving: ServedModel, request: LlamaRequest):
        super().__init__()
        self._model, self._is_silent = serving.names.answered(request.model), request.n_predict == 0
        self._max_model_len, self._paths = serving.max_model_len, request.response_fields
        self._content: list[str] = []
        self._last: Table = {}

    def write(self, event: Table) -> bytes:
        return b"data: " + encode(event) + b"\n\n"

    def add(self, text: str) -> Iterator[Table]:
        if not self._is_silent:
            self._content.append(text)
            yield {"index": 0, "content": text, "stop": False}

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterator[Table]:
        (to_first, behind), new = self.seconds(), 0 if self._is_silent else usage.new
        word = stop if isinstance(stop, str) else ""
        self._last = {
            "index": 0,
            "content": "",
            "stop": True,
            "model": self._model,
            "generation_settings": {"n_ctx": self._max_model_len},
            "stop_type": "word" if word else STOP_TYPES.get(reason or "", "none"),
            "stopping_word": word,
            "truncated": False,
            "tokens_predicted": new,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "timings": {
                "cache_n": usage.cached,
                **_speed("prompt", usage.prompt - usage.cached, to_first),
                **_speed("predicted", new, behind),
            },
        }
        yield self._last

    def failed(self, problem: APIError) -> bytes:
        return b"error: " + encode(problem.table()["error"]) + b"\n\n"

    def body(self) -> Table:
        whole = {**self._last, "content": "".join(self._content)}
        return whole if self._paths is None else _chosen(whole, self._paths)


def _chosen(table: Table, paths: list[str]) -> Table:
    """Values in nested tables, by their paths; a path that leads nowhere is left out."""
    values: Table = {}
    for path in paths:
        value: Any = table
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            values[path] = value
    return values


def _speed(name: str, num_tokens: int, seconds: float) -> Table:
    """Tokens, milliseconds, those of a token, and tokens a second."""
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / max(num_tokens, 1), 3),
        f"{name}_per_second": round(num_tokens / max(seconds, 1e-6), 3),
    }
