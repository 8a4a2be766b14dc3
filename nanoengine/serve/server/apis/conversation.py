"""Conversation: the next turn of a conversation, with its prompt and sampling parameters; and parts of its messages."""

from __future__ import annotations

from typing import Any

from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.tool_calls.answer_parser import StreamParser
from nanoengine.features.tool_calls.prompt import Prompt, plain_prompt
from nanoengine.serve.server.bodies.prompts import CHARS_OF_A_STEP
from nanoengine.serve.server.bodies.protocol import ChatRequest, Table
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.submission import Encoding, Submission


class Conversation(Submission[ChatRequest]):
    """The next turn of a conversation. `text`: the prompt; None: it is rendered from the messages."""

    prompt: Prompt  # set by `encode`
    params: SamplingParams
    text: str | None = None

    def encode(self) -> Encoding:
        serving, request = self.serving, self.request
        self.prompt = prompt = serving.prompts.of_chat(request) if self.text is None else plain_prompt(self.text)
        serving.prompts.check_length(prompt.text, request)
        if len(prompt.text) > CHARS_OF_A_STEP:
            yield
        cache_key = {"client": self.client, "salt": request.cache_salt or ""}
        special = bool(request.add_special_tokens)
        token_ids = serving.prompts.chat_encoder.encode(prompt.text, **cache_key, add_special_tokens=special)
        return [token_ids], prompt.params(self.params)

    def count_thought(self, token_ids: list[int]) -> int:
        """Tokens of a whole answer that are its thought."""
        thought = self.prompt.thought
        return 0 if thought is None else thought.count(token_ids, self.serving.tokenizer.decode)

    def parser(self) -> StreamParser:
        """For one answer."""
        return self.prompt.parser(skip_special_tokens=self.params.skip_special_tokens)


def ended_by(reason: str | None, has_called: bool) -> str | None:
    """The finish reason for clients: "tool_calls" for an answer with calls that ended by itself."""
    return "tool_calls" if has_called and reason == "stop" else reason


# ---- messages of a `ChatRequest`


def merge_system_messages(messages: list[Table]) -> list[Table]:
    """Messages with at most one system message, at the beginning: many chat templates take no other.

    System messages at the beginning become one. A later one, as agents send it, is added to the user's message before it.
    """
    merged: list[Table] = []
    parts: list[Table] | None = None  # the content of the last one, where it is a list that was made here
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        last = merged[-1] if merged else None
        if last is None or not is_system or last["role"] not in ("system", "user"):
            role = "system" if last is None and is_system else "user" if is_system else message["role"]
            merged.append({**message, "role": role})
            parts = None
            continue
        if parts is None:
            parts = last["content"] = [*parts_of(last["content"])]
        parts += parts_of(message["content"])
    return merged


def parts_of(content: str | list[Table]) -> list[Table]:
    """The parts of a content."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(table: Table, name: str, where: str, param: str) -> str:
    """A field of a part of a message, which must be a text. `where`: the part, as clients call it. `param`: their field of it."""
    value = table.get(name)
    if not isinstance(value, str):
        raise APIError(400, f"{where}.{name} must be a text", param)
    return value


def unsupported(what: str, kind: Any, where: str, param: str) -> APIError:
    """The refusal of blocks, items or parts of a kind. Arguments as for `text_of`."""
    return APIError(400, f"{where}: {what} of type {str(kind)[:80]!r} are not supported: this model takes text", param)


def json_schema(schema: Any) -> Table:
    """The `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def assistant_message(text: str | None, calls: list[Table], reasoning: str = "") -> Table:
    """A message of the model."""
    message: Table = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def tool_call(call_id: str, name: str, arguments: Any) -> Table:
    """A call in a message of the model; arguments are JSON text, or a table."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_table(name: str, description: str | None, parameters: Table | None, strict: bool | None = None) -> Table:
    """A tool, as /v1/chat/completions has it."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def choice_of(name: str) -> Table:
    """The `tool_choice` of one function."""
    return {"type": "function", "function": {"name": name}}
