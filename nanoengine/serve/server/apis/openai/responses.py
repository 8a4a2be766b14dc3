"""POST /v1/responses: OpenAI's newer interface, which Codex speaks (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.features.tool_calls.answer_parser import Call, CallPiece, Event, Reasoning, Text
from nanoengine.serve.server.apis.conversation import choice_of, json_schema, merge_system_messages
from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.json_response import encode
from nanoengine.serve.server.apis.openai.response_items import Tools, encode_thought, turns
from nanoengine.serve.server.apis.writer import Usage, Writer, reply
from nanoengine.serve.server.bodies.fields import IGNORED_RESPONSES, Body, with_fields
from nanoengine.serve.server.bodies.protocol import SAMPLING, Named, ReasoningWish, Table, TranslatedRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel

ENCRYPTED = "reasoning.encrypted_content"


class TextOptions(with_fields(Body, ("verbosity",)), kw_only=True):  # type: ignore[misc, call-arg]
    """The format of the text."""

    format: Table | None = None


class ResponsesRequest(
    with_fields(Named, IGNORED_RESPONSES, SAMPLING),  # type: ignore[misc]
    kw_only=True,  # type: ignore[call-arg]
):
    """POST /v1/responses."""

    input: str | list[Table]
    instructions: str | None = None
    include: list[str] | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    chat_template_kwargs: Table | None = None
    text: TextOptions | None = None
    reasoning: ReasoningWish | None = None
    tools: list[Table] | None = None
    tool_choice: str | Table | None = None
    parallel_tool_calls: bool | None = True

    def check(self) -> None:
        if "message.output_text.logprobs" in (self.include or ()):
            raise APIError(400, "include: message.output_text.logprobs is not supported: leave it out", "include")
        if not self.input:
            raise APIError(400, "input is empty: give text or items", "input")

    def chat(self, tools: Tools) -> TranslatedRequest:
        """The conversation, as /v1/chat/completions has it."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return TranslatedRequest(
            messages=merge_system_messages([*first, *turns(self.input)]),
            tools=tools.tables or None,
            tool_choice=_choice(self.tool_choice) if tools.tables or self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text and self.text.format),
            names={
                "prompt": "input",
                "max_tokens": "max_output_tokens",
                "response_format": "text.format",
                **tools.fields,
            },
            reasoning=self.reasoning,
            chat_template_kwargs=self.chat_template_kwargs,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            **{name: getattr(self, name) for name in SAMPLING},
        )


async def responses(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Answer a conversation."""
    response_id = new_id("resp_", http, None)

    def begun(request: ResponsesRequest) -> tuple[TranslatedRequest, ResponsesWriter]:
        tools = Tools(request.tools or [])
        return request.chat(tools), ResponsesWriter(response_id, request, tools)

    request, (chat, writer) = await serving.read_as(http, ResponsesRequest, begun)
    writer.response["model"] = request.model or serving.name
    return await reply(http, serving, chat, response_id, writer)


def _choice(choice: str | Table | None) -> str | Table | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return choice_of(choice.get("name", ""))
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        tools = [
            choice_of(tool.get("name", ""))
            for tool in (allowed if isinstance(allowed, list) else ())
            if isinstance(tool, dict)
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    message = f"tool_choice.type is {str(choice.get('type'))[:80]!r}: it must be function or allowed_tools"
    raise APIError(400, message, "tool_choice")


def _format(table: Table | None) -> Table | None:
    return json_schema(table.get("schema")) if table and table.get("type") == "json_schema" else table


def _encoded(value: Any) -> msgspec.Raw:
    """The JSON of a value that may be long and is in several events."""
    return msgspec.Raw(encode(value))


def _sent(table: Body | None) -> Table:
    """The fields of a table that the client has sent, which the answer repeats."""
    fields = {} if table is None else msgspec.structs.asdict(table)
    return {name: value for name, value in fields.items() if value is not None}


class ResponsesWriter(Writer):
    """One response.

    Args:
        response_id: of the response.
        request: its body.
        tools: of the request.
    """

    def __init__(self, response_id: str, request: ResponsesRequest, tools: Tools):
        super().__init__()
        self._tools = tools
        self._id = response_id.removeprefix("resp_")
        self._is_carried = ENCRYPTED in (request.include or ())
        self._text = ""  # of the open block
        self._number = 0
        self.response: Table = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": _encoded(request.instructions),
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | _sent(request.reasoning),
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}} | _sent(request.text),
            "tool_choice": request.tool_choice or "auto",
            "tools": _encoded(request.tools or []),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _event(self, kind: str, **fields: Any) -> Table:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Table:
        output = self.response["output"]
        return self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **fields)

    def begin(self, usage: Usage) -> Iterator[Table]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=dict(self.response))

    def open(self, event: Event) -> Iterator[Table]:
        output = self.response["output"]
        suffix = f"{self._id}_{len(output)}"
        item: Table = {"id": f"msg_{suffix}", "type": "message", "role": "assistant", "content": []}
        if isinstance(event, Reasoning):
            item = {"id": f"rs_{suffix}", "type": "reasoning", "summary": [], "content": []}
        elif isinstance(event, CallPiece):
            item = {"id": f"fc_{suffix}", "type": "function_call", "call_id": self.prompt.new_id(), "arguments": ""}
            item |= self._tools.names(event.name or "")
        item["status"] = "in_progress"
        output.append(item)
        self._text = ""
        yield self._event("output_item.added", output_index=len(output) - 1, item=dict(item))
        if "content" in item:
            yield self._of_item("content_part.added", content_index=0, part=self._part())

    def _part(self) -> Table:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def add(self, text: str) -> Iterator[Table]:
        self._text += text
        if self._kind is CallPiece:
            yield self._of_item("function_call_arguments.delta", delta=text)
        elif self._kind is Reasoning:
            yield self._of_item("reasoning_text.delta", content_index=0, delta=text)
        else:
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[])

    def called(self, call: Call) -> Iterable[Table]:
        self.response["output"][-1]["status"] = "completed"
        return ()

    def close(self) -> Iterator[Table]:
        output, text = self.response["output"], self._text
        item = output[-1]
        if self._kind is CallPiece:
            item["arguments"] = text
            if item["status"] != "completed":
                item["status"] = "incomplete"
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            item["content"] = [part := self._part()]
            if self._kind is Reasoning:
                if self._is_carried:
                    item["encrypted_content"] = encode_thought(text)
                yield self._of_item("reasoning_text.done", content_index=0, text=text)
            else:
                yield self._of_item("output_text.done", content_index=0, text=text, logprobs=[])
            yield self._of_item("content_part.done", content_index=0, part=part)
            item["status"] = "completed"
        yield self._event("output_item.done", output_index=len(output) - 1, item=dict(item))

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterator[Table]:
        if not self.response["output"]:  # an answer of no words
            yield from self.say([Text("")])
            yield from self.close_last()
        is_whole = reason in ("stop", "tool_calls")
        self.response |= {
            "status": "completed" if is_whole else "incomplete",
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.new,
                "output_tokens_details": {"reasoning_tokens": usage.thought},
                "total_tokens": usage.prompt + usage.new,
            },
        }
        if not is_whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        yield self._event("completed" if is_whole else "incomplete", response=self.response)

    def failed(self, problem: APIError) -> bytes:
        code = "server_error" if problem.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": problem.message}}
        return self.write(self._event("failed", response=self.response))

    def body(self) -> Table:
        return self.response
