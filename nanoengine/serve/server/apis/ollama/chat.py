"""Ollama's interface: /api/chat, /api/generate and the endpoints that its clients call before (https://docs.ollama.com/api).

Streams are lines of JSON, and the default. The server of one model loads and unloads none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.builder import is_installed
from nanoengine.errors import InvalidPrompt
from nanoengine.features.tool_calls.answer_parser import Call, CallPiece, Reasoning
from nanoengine.serve.server.apis.conversation import json_schema, tool_call
from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.json_response import encode, json_response
from nanoengine.serve.server.apis.local_sampling import OURS, THEIRS, LocalSampling
from nanoengine.serve.server.apis.writer import Usage, Writer, reply
from nanoengine.serve.server.bodies.fields import IGNORED_OLLAMA, IGNORED_OPTIONS, UNAVAILABLE_OLLAMA, with_fields
from nanoengine.serve.server.bodies.protocol import Positive, Stops, Table, Texts, TranslatedRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.model_card import ModelCard
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel

NEVER = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded."""


LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict")
OTHERS = {"stop_sequences": "stop", "repetition_penalty": "repeat_penalty", **dict.fromkeys(LIMITS, "num_predict")}
"""Names of other interfaces that clients send for options -> the options."""

NAMES = (*OTHERS, *OURS, "stop", "repeat_last_n")
"""Names of the options of sampling; of two values for one option the later name counts."""

TYPES = {**dict.fromkeys(LIMITS, int), "stop_sequences": Stops, "repetition_penalty": float}


class OllamaOptions(with_fields(LocalSampling, IGNORED_OPTIONS, TYPES), kw_only=True):  # type: ignore[misc, call-arg]
    """Sampling parameters, and the layout of the model in memory."""

    unavailable: ClassVar[tuple[str, ...] | None] = UNAVAILABLE_OLLAMA


class _Generation(with_fields(OllamaOptions, IGNORED_OLLAMA), kw_only=True):  # type: ignore[misc, call-arg]
    """Fields of both requests. What `options` says counts before an option beside it."""

    model: str
    stream: bool | None = True
    format: str | Table | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None

    def chat(self, messages: list[Table], tools: list[Table] | None = None) -> TranslatedRequest:
        """A conversation, as /v1/chat/completions has it."""
        values = [(name, getattr(table, name)) for table in (self, self.options or OllamaOptions()) for name in NAMES]
        options = OllamaOptions(**{OTHERS.get(name, name): value for name, value in values if value is not None})
        limit = options.num_predict
        is_begun = bool(messages) and messages[-1]["role"] == "assistant"  # the model goes on with it
        return TranslatedRequest(
            messages=messages,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            tools=tools or None,
            stream=self.stream is not False,
            max_tokens=limit if limit is not None and limit > 0 else None,  # 0: no limit, as in Ollama
            response_format=_format(self.format),
            enable_thinking=self.think is not False if self.think is not None else None,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            names=THEIRS | {"max_tokens": "num_predict", "response_format": "format"},
            **options.of_chat(),
        )


class OllamaChatRequest(_Generation, kw_only=True):  # type: ignore[call-arg]
    """POST /api/chat."""

    messages: list[Table] | None = None
    tools: list[Table] | None = None


class OllamaGenerateRequest(_Generation, kw_only=True):  # type: ignore[call-arg]
    """POST /api/generate."""

    prompt: str | None = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = False


class OllamaShowRequest(with_fields(OllamaOptions, ("verbose",)), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /api/show. `name` is what older clients call the model."""

    model: str | None = None
    name: str | None = None


class OllamaEmbedRequest(with_fields(OllamaOptions, ("keep_alive",)), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /api/embed. No option of sampling can change an embedding."""

    model: str
    input: Texts | None = None
    truncate: bool | None = True
    dimensions: Positive | None = None
    options: OllamaOptions | None = None


async def chat(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Answer a conversation."""
    request, messages = await serving.read_as(http, OllamaChatRequest, _messages)
    if not messages:
        return _loaded(request, message={"role": "assistant", "content": ""})
    writer = OllamaWriter(request.model, is_chat=True)
    return await reply(http, serving, request.chat(messages, request.tools), new_id("ollama-", http, None), writer)


async def generate(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Answer one prompt."""
    request = await serving.read(http, OllamaGenerateRequest)
    if not request.prompt and not request.suffix:
        return _loaded(request, response="")
    first = [{"role": "system", "content": request.system}] if request.system else []
    chat_request = request.chat([*first, {"role": "user", "content": request.prompt}])
    text = request.prompt if request.raw else None
    if not serving.tokenizer.chat_templates:  # it goes on with texts
        text = "\n".join(filter(None, (request.system, request.prompt)))
    if request.suffix:
        marks = serving.prompts.fill_tokens
        text, chat_request.stop_token_ids = marks.prompt(request.prompt or "", request.suffix), list(marks.ends)
    chat_request.add_special_tokens, chat_request.names["prompt"] = text is not None, "prompt"
    writer = OllamaWriter(request.model, is_chat=False)
    return await reply(http, serving, chat_request, new_id("ollama-", http, None), writer, text)


async def tags(_: HTTPRequest, serving: ServedModel) -> Response:
    """The model under each of its names, and its adapters."""
    return json_response({"models": [_listed(serving, name) for name in serving.names.all]})


async def ps(_: HTTPRequest, serving: ServedModel) -> Response:
    """The models in memory: all of them, for ever."""
    card, names = serving.card, serving.names.all
    rest = {
        "size_vram": card.size if serving.on_gpu else 0,
        "context_length": serving.max_model_len,
        "expires_at": NEVER,
    }
    return json_response({"models": [_listed(serving, name) | rest for name in names]})


def _listed(serving: ServedModel, name: str) -> Table:
    return serving.card.row(name, name if serving.names.is_model(name) else serving.name)


async def show(http: HTTPRequest, serving: ServedModel) -> Response:
    """The abilities, the template and the sizes of the model."""
    request = await serving.read(http, OllamaShowRequest)
    name = request.model or request.name
    if name is None:
        raise APIError(400, "model is missing", "model")
    serving.names.check(name)
    info = await serving.text.run(serving.tokenizer.info)
    template, can_insert = str(info.get("chat_template", "")), False
    with suppress(InvalidPrompt):
        can_insert = bool(serving.prompts.fill_tokens)
    facts = shown(serving.card, template, serving.max_model_len, can_insert=can_insert)
    facts |= {"parameters": _advised(serving.defaults), "details": _listed(serving, name)["details"]}
    return json_response(facts)


def shown(card: ModelCard, template: str, max_model_len: int, *, can_insert: bool = False) -> Table:
    """The answer of /api/show. `template`: of chats, or empty; `can_insert`: the model knows /infill."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": card.details,
        "modified_at": card.modified,
        "model_info": card.info | {f"{card.details['family']}.context_length": max_model_len},
        "capabilities": _abilities(template, writes=card.writes, can_insert=can_insert),
    }


def _abilities(template: str, *, writes: bool, can_insert: bool) -> list[str]:
    """The capabilities of a model, in Ollama's words. `template`: of its chats, or empty."""
    can = [*(["completion"] if writes else []), *(["embedding"] if is_installed("pooling") else [])]
    can += ["insert"] if can_insert else []
    if template:
        can += ["tools", *(["thinking"] if "</think>" in template or "<|channel|>" in template else [])]
    return can


def _advised(defaults: Mapping[str, Any]) -> str:
    """The default sampling parameters, one on each line."""
    return "\n".join(f"{theirs} {defaults[name]}" for theirs, name in OURS.items() if name in defaults)


# ---- what clients send


def _messages(request: OllamaChatRequest) -> list[Table]:
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages or ())]


def _message(message: Table, where: str) -> Table:
    if message.get("images"):
        raise APIError(400, f"{where}: images are not supported: this model takes text", "messages")
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content") or "", str):
        raise APIError(400, f"{where}: a message has a role, and a content that is a text", "messages")
    converted = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("thinking"):
        converted["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        converted["name"] = message["tool_name"]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise APIError(400, f"{where}: tool_calls must be a list", "messages")
        converted["tool_calls"] = [_call(call, index, where) for index, call in enumerate(calls)]
    return converted


def _call(call: Any, index: int, where: str) -> Table:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(400, f"{where}: tool_calls[{index}] must have a function with a name", "messages")
    return tool_call(call.get("id") or f"call_{index}", function["name"], function.get("arguments") or {})


def _format(format: str | Table | None) -> Table | None:
    if not format:
        return None
    if isinstance(format, dict):
        return json_schema(format)
    if format != "json":
        raise APIError(400, f"format is {format[:80]!r}: it must be 'json' or a schema", "format")
    return {"type": "json_object"}


# ---- what the server sends


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _loaded(request: _Generation, **fields: Any) -> Response:
    """The answer to a request without a prompt, which loads or unloads a model in Ollama; here the model stays."""
    reason = "unload" if str(request.keep_alive).rstrip("smh") in ("0", "0.0") else "load"
    return loaded_answer(request.model, reason, **fields)


def loaded_answer(model: str, reason: str, **fields: Any) -> Response:
    """The answer to a request without a prompt. `reason`: "load" or "unload"."""
    return json_response({"model": model, "created_at": _now(), **fields, "done": True, "done_reason": reason})


class OllamaWriter(Writer):
    """One answer. Arguments: the model as the client calls it, and whether it is a message or a text."""

    media_type: ClassVar[bytes] = b"application/x-ndjson"
    ping: ClassVar[bytes] = b" "  # in front of the next line: its clients take no empty ones

    def __init__(self, model: str, is_chat: bool):
        super().__init__()
        self._model, self._is_chat = model, is_chat
        self._answer: Table = {}
        self._whole: Table = {}

    def write(self, event: Table) -> bytes:
        return encode(event) + b"\n"

    def _line(self, part: Table, **rest: Any) -> Table:
        line = {"message": {"role": "assistant", "content": "", **part}} if self._is_chat else {"response": "", **part}
        return {"model": self._model, "created_at": _now(), **line, "done": False, **rest}

    def add(self, text: str) -> Iterator[Table]:
        if self._kind is CallPiece:  # its clients take whole calls
            return
        fields = {"thinking" if self._kind is Reasoning else "content" if self._is_chat else "response": text}
        for name in fields:
            self._answer[name] = self._answer.get(name, "") + text
        yield self._line(fields)

    def called(self, call: Call) -> Iterator[Table]:
        calls = self._answer.setdefault("tool_calls", [])
        function = {"index": len(calls), "name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}
        calls.append({"id": self.prompt.new_id(), "function": function})
        yield self._line({"tool_calls": calls[-1:]})

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterator[Table]:
        prompt, new = (int(1e9 * seconds) for seconds in self.seconds())
        rest = {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": prompt + new,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": prompt,
            "eval_count": usage.new,
            "eval_duration": new,
        }
        self._whole = self._line(self._answer) | rest
        yield self._line({}) | rest

    def failed(self, problem: APIError) -> bytes:
        return self.write(problem.table("/api/"))

    def body(self) -> Table:
        return self._whole
