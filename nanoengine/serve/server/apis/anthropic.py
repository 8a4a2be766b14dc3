"""POST /v1/messages: Anthropic's interface, as its clients and Claude Code speak it (https://docs.claude.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.errors import shown
from nanoengine.features.tool_calls.answer_parser import Call, CallPiece, Event, Reasoning, Text
from nanoengine.serve.server.apis.conversation import (
    assistant_message,
    choice_of,
    merge_system_messages,
    parts_of,
    text_of,
    tool_call,
    tool_table,
    unsupported,
)
from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.json_response import json_response
from nanoengine.serve.server.apis.writer import Usage, Writer, reply
from nanoengine.serve.server.bodies.fields import IGNORED_MESSAGES, Body, with_fields
from nanoengine.serve.server.bodies.protocol import Messages, Named, Stop, Table, ThinkingWish, TranslatedRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import CLIENT, new_id
from nanoengine.serve.server.served_model import ServedModel

CHOICES = {None: None, "auto": "auto", "any": "required", "none": "none"}

STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reasons by finish reasons; "stop" is "end_turn" or "stop_sequence"."""


class ToolChoice(Body, kw_only=True):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"] | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Format(with_fields(Body, ("name", "description", "strict")), kw_only=True):  # type: ignore[misc, call-arg]
    """The schema of the text."""

    type: str | None = None
    schema: Table | None = None


class OutputConfig(Body, kw_only=True):
    """The format of the answer, and the effort of thinking."""

    format: Format | None = None
    effort: str | None = None


class Thread(Body, kw_only=True):
    """A conversation that Anthropic's server keeps. A request that begins one has all its messages."""

    type: Literal["create", "continue"] | None = None
    previous_message_id: str | None = None


class CountTokensRequest(with_fields(Named, IGNORED_MESSAGES), kw_only=True):  # type: ignore[misc, call-arg]
    """POST /v1/messages/count_tokens, and fields of POST /v1/messages."""

    messages: Messages
    system: str | list[Table] | None = None
    tools: list[Table] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # as older clients have output_config.format
    thread: Thread | None = None

    def check(self) -> None:
        # A conversation that another server would have stored: clients then send all messages.
        if self.thread is not None and self.thread.type == "continue":
            message = "thread.type is continue, and this server keeps no conversations: send all messages"
            raise APIError(404, message, "thread", code="thread_not_found")

    def chat(self) -> TranslatedRequest:
        """The conversation, as /v1/chat/completions has it."""
        messages = _system(self.system)
        for index, message in enumerate(self.messages):
            messages += _turns(message, f"messages[{index}]")
        messages = merge_system_messages(messages)
        is_begun = messages[-1]["role"] == "assistant"  # the model goes on with it
        choice, output = self.tool_choice or ToolChoice(), self.output_config or OutputConfig()
        return TranslatedRequest(
            messages=messages,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_choice(choice) if self.tools or choice.type != "auto" else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_format=_format(output.format or self.output_format),
            reasoning_effort=output.effort,
            thinking=self.thinking,
            names={
                "stop": "stop_sequences",
                "response_format": "output_config.format" if output.format else "output_format",
                **{f"tools[{i}].function.parameters": f"tools[{i}].input_schema" for i in range(len(self.tools or ()))},
            },
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        )


class MessagesRequest(CountTokensRequest, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[Stop], Meta(max_length=1024)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def chat(self) -> TranslatedRequest:
        chat = super().chat()
        for name in ("max_tokens", "stream", "temperature", "top_k", "top_p"):
            setattr(chat, name, getattr(self, name))
        chat.stop = self.stop_sequences
        return chat


async def messages(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Answer a conversation."""
    request, chat = await serving.read_as(http, MessagesRequest, MessagesRequest.chat)
    job_id = new_id("msg_", http, None)
    return await reply(http, serving, chat, job_id, MessagesWriter(job_id, request.model or serving.name))


async def count_tokens(http: HTTPRequest, serving: ServedModel) -> Response:
    """The number of tokens of a conversation."""
    _, chat = await serving.read_as(http, CountTokensRequest, CountTokensRequest.chat)
    counting = serving.text.run(serving.prompts.count, chat, http.scope[CLIENT])
    return json_response({"input_tokens": await serving.jobs.while_connected(http.receive, counting)})


# ---- what clients send

_text = partial(text_of, param="messages")
_unsupported = partial(unsupported, "blocks", param="messages")


def _system(system: str | list[Table] | None) -> list[Table]:
    """The system message, without Claude Code's block about billing: it differs in every request, and would break the cache."""
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text")).startswith("x-anthropic-billing-header:")]
    return [{"role": "system", "content": system}] if system else []


def _turns(message: Table, where: str) -> list[Table]:
    """A message of Anthropic's as messages of a chat, in which each result of a tool is a message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise APIError(400, f"{where}: role is {shown(role)}: it must be user, assistant or system", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant" and content is None:
        content = []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise APIError(400, f"{where}: content must be a text or a list of blocks", "messages")
    return [_assistant_message(content, where)] if role == "assistant" else _other_messages(role, content, where)


def _assistant_message(blocks: list[Table], where: str) -> Table:
    texts, calls, thoughts = [], [], []
    for index, block in enumerate(blocks):
        path = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", path))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", path))
        elif kind == "tool_use":
            calls.append(tool_call(_text(block, "id", path), _text(block, "name", path), block.get("input") or {}))
        elif kind != "redacted_thinking":  # of another model, which alone can read it
            raise _unsupported(kind, path)
    return assistant_message("".join(texts) or (None if calls else ""), calls, "\n".join(thoughts))


def _other_messages(role: str, blocks: list[Table], where: str) -> list[Table]:
    turns: list[Table] = []
    texts: list[Table] = []
    for index, block in enumerate(blocks):
        path = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "tool_result":
            content = block.get("content") or ""
            for part in content if isinstance(content, list) else ():
                if not isinstance(part, dict) or part.get("type") != "text":
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise _unsupported(kind, f"{path}.content")
            if block.get("is_error"):  # templates have no field for it
                content = [{"type": "text", "text": "Error:"}, *parts_of(content)]
            turns.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", path), "content": content})
        elif kind == "text":
            texts.append({"type": "text", "text": _text(block, "text", path)})
        else:
            raise _unsupported(kind, path)
    return [*turns, {"role": role, "content": texts}] if texts or not turns else turns


def _tool(tool: Table) -> Table:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = f"tools: {str(kind)[:80]!r} is a tool that another server runs: give tools with an input_schema"
        raise APIError(400, message, "tools")
    return tool_table(tool.get("name", ""), tool.get("description"), tool.get("input_schema"), tool.get("strict"))


def _choice(choice: ToolChoice) -> str | Table | None:
    return choice_of(choice.name or "") if choice.type == "tool" else CHOICES.get(choice.type)


def _format(output: Format | None) -> Table | None:
    return None if output in (None, Format()) else {"type": output.type, "json_schema": {"schema": output.schema}}


# ---- what the server sends


class MessagesWriter(Writer):
    """One message. Arguments: its id, and the name of the model as the client has it."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, message_id: str, model: str):
        super().__init__()
        self._blocks: list[Table] = []
        self._message: Table = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def begin(self, usage: Usage) -> Iterator[Table]:
        self._message["usage"] = _usage(usage)
        yield {"type": "message_start", "message": self._message}
        yield {"type": "ping"}

    def open(self, event: Event) -> Iterator[Table]:
        block: Table = {"type": "text", "text": ""}
        if isinstance(event, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(event, CallPiece):
            block = {"type": "tool_use", "id": self.prompt.new_id(), "name": event.name, "input": {}}
        yield {"type": "content_block_start", "index": len(self._blocks), "content_block": dict(block)}
        self._blocks.append(block)

    def add(self, text: str) -> Iterator[Table]:
        block = self._blocks[-1]
        if self._kind is CallPiece:
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            name = "text" if self._kind is Text else "thinking"
            block[name] += text
            delta = {"type": f"{name}_delta", name: text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def called(self, call: Call) -> Iterable[Table]:
        self._blocks[-1]["input"] = msgspec.Raw(call.arguments.encode())
        return ()

    def close(self) -> Iterator[Table]:
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterator[Table]:
        by_text = reason == "stop" and isinstance(stop, str)
        name = "stop_sequence" if by_text else STOPS.get(reason or "", "end_turn")
        delta = {"stop_reason": name, "stop_sequence": stop if by_text else None}
        self._message |= {"content": self._blocks, **delta, "usage": _usage(usage)}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failed(self, problem: APIError) -> bytes:
        return self.write(problem.table("/v1/messages"))

    def body(self) -> Table:
        return self._message


def _usage(usage: Usage) -> Table:
    """Anthropic's usage: tokens from the cache do not count as input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.new,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
    }
