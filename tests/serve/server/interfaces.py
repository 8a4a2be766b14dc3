"""The interfaces for conversations: each asks in its own words, and reads what it answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest

from tests.serve.server.events import choices_of
from tests.serve.server.interface import (
    TOOLS,
    Call,
    Interface,
    Part,
    Result,
    Said,
    Table,
    Thought,
    Turn,
    distinct,
    function,
    joined,
    of_kind,
    present,
)
from tests.serve.server.running import Answer
from tests.serve.server.streams import lines, typed_events


class Chat(Interface):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    has_blocks = False
    streaming: ClassVar[Table] = {"stream": True, "stream_options": {"include_usage": True}}
    reasons: ClassVar[dict[str, str]] = {"calls": "tool_calls"}

    def _body(self, turns: Sequence[Turn], asked: Any, more: Table) -> Table:
        messages: list[Table] = []
        for role, *parts in turns:
            texts = [{"type": "text", "text": own} for own in of_kind(parts, str)]
            content = texts[0]["text"] if len(texts) == 1 else texts or None
            calls = [self._call(own) for own in of_kind(parts, Call)]
            for name, text in of_kind(parts, Result):
                messages.append({"role": "tool", "tool_call_id": f"call_{name}", "content": text})
            if role != "tool":
                messages.append({"role": role, "content": content} | present(tool_calls=calls))
        named = {"type": "function", "function": {"name": asked.choice}}
        schema = {"name": "x", "schema": asked.schema}
        return more | present(
            messages=messages,
            model=asked.model,
            tools=[function(own) for own in asked.tools],
            tool_choice=named if asked.choice in TOOLS else asked.choice,
            parallel_tool_calls=asked.parallel,
            response_format=asked.schema and {"type": "json_schema", "json_schema": schema},
            stop=asked.stop,
            max_tokens=asked.max_tokens,
        )

    def _call(self, own: Call) -> Table:
        made = {"name": own.name, "arguments": json.dumps(own.arguments)}
        return {"id": f"call_{own.name}", "type": "function", "function": made}

    def put_together(self, answer: Answer) -> Table:
        events = answer.events
        message: Table = {}
        for choice in choices_of(events):
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls = message.setdefault(name, [])
                    for call in value:
                        index = call.pop("index")
                        if "id" in call:
                            assert index == len(calls)
                            calls.append(call)
                        else:
                            calls[index]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    message[name] = message.get(name, "") + value
        [ended] = [own for own in choices_of(events) if own["finish_reason"]]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": ended["finish_reason"],
            "stop_reason": ended["stop_reason"],
        }
        return {"choices": [choice], "model": events[0]["model"], "usage": events[-1]["usage"]}

    def read(self, found: Table) -> Said:
        [choice] = found["choices"]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        distinct([own["id"] for own in calls])
        assert message.get("reasoning") == message.get("reasoning_content")
        parts = [Thought(message.get("reasoning") or ""), message.get("content") or ""]
        functions = [own["function"] for own in calls]
        parts += [Call(own["name"], json.loads(own["arguments"])) for own in functions]
        usage = found["usage"]
        return Said(joined(parts), choice["finish_reason"], (usage["prompt_tokens"], usage["completion_tokens"]))

    def last_error(self, answer: Answer) -> Any:
        return answer.events[-1]["error"]["code"]


class Messages(Interface):
    """Anthropic's."""

    path = "/v1/messages"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    reasons: ClassVar[dict[str, str]] = {
        "stop": "end_turn",
        "length": "max_tokens",
        "calls": "tool_use",
        "stop string": "stop_sequence",
    }

    def _body(self, turns: Sequence[Turn], asked: Any, more: Table) -> Table:
        blocks = [(role, [self._block(own) for own in parts]) for role, *parts in turns]
        choice = asked.choice or (None if asked.parallel is None else "auto")
        kinds = {"auto": "auto", "none": "none", "required": "any", **dict.fromkeys(TOOLS, "tool")}
        named = present(type=kinds.get(choice), name=choice if choice in TOOLS else None)
        return more | present(
            model=asked.model,
            max_tokens=2000 if asked.max_tokens is None else asked.max_tokens,
            system=[block for role, own in blocks for block in own if role == "system"],
            messages=[
                {"role": {"tool": "user"}.get(role, role), "content": own} for role, own in blocks if role != "system"
            ],
            tools=[{"name": own, "input_schema": TOOLS[own]} for own in asked.tools],
            tool_choice=(named | ({"disable_parallel_tool_use": True} if asked.parallel is False else {})) or None,
            output_config=asked.schema and {"format": {"type": "json_schema", "schema": asked.schema}},
            stop_sequences=asked.stop,
        )

    def _block(self, part: Part) -> Table:
        if isinstance(part, Call):
            return {"type": "tool_use", "id": f"call_{part.name}", "name": part.name, "input": part.arguments}
        if isinstance(part, Result):
            text = [{"type": "text", "text": part.text}]
            return {"type": "tool_result", "tool_use_id": f"call_{part.name}", "content": text}
        return {"type": "text", "text": part}

    def put_together(self, answer: Answer) -> Table:
        start, *events = typed_events(answer)
        assert start["type"] == "message_start"
        message: Table = start["message"]
        assert message["content"] == []
        assert message["id"].startswith("msg")
        is_open, text = False, ""
        for event in events:
            kind = event["type"]
            if kind == "content_block_start":
                assert (is_open, event["index"]) == (False, len(message["content"]))
                is_open, block, text = True, event["content_block"], ""
                message["content"].append(block)
            elif kind == "content_block_delta":
                assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
                name = event["delta"]["type"].removesuffix("_delta")
                if name == "input_json":
                    text += event["delta"]["partial_json"]
                else:
                    block[name] += event["delta"][name]
            elif kind == "content_block_stop":
                assert is_open
                is_open = False
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text)
            elif kind == "message_delta":
                message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
            else:
                assert kind in ("ping", "message_stop")
        assert (events[-1]["type"], is_open) == ("message_stop", False)
        return message

    def read(self, found: Table) -> Said:
        distinct([own["id"] for own in found["content"] if own["type"] == "tool_use"])
        usage = found["usage"]
        num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return Said(
            [self._part(own) for own in found["content"]], found["stop_reason"], (num_prompt, usage["output_tokens"])
        )

    def _part(self, block: Table) -> Part:
        if block["type"] == "tool_use":
            return Call(block["name"], block["input"])
        return Thought(block["thinking"]) if block["type"] == "thinking" else str(block["text"])

    def error(self, answer: Answer) -> str:
        assert set(answer.json) == {"type", "error"}
        assert answer.json["type"] == "error"
        kinds = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error"}
        kind = (kinds | {503: "overloaded_error", 504: "timeout_error"})[answer.status]
        assert answer.json["error"]["type"] == kind
        return str(answer.json["error"]["message"])

    def last_error(self, answer: Answer) -> Any:
        start, *_, last = typed_events(answer)
        assert (start["type"], last["type"]) == ("message_start", "error")
        return last["error"]["type"]


class Responses(Interface):
    """OpenAI's newer one."""

    path = "/v1/responses"
    lacks = frozenset({"stop"})
    reasons: ClassVar[dict[str, str]] = {"stop": "completed", "calls": "completed", "length": "max_output_tokens"}

    def _body(self, turns: Sequence[Turn], asked: Any, more: Table) -> Table:
        named = {"type": "function", "name": asked.choice}
        schema = asked.schema and {"type": "json_schema", "name": "x", "schema": asked.schema}
        return more | present(
            input=[item for role, *parts in turns for item in self._items(role, parts)],
            model=asked.model,
            tools=[{"type": "function", "name": own, "parameters": TOOLS[own]} for own in asked.tools],
            tool_choice=named if asked.choice in TOOLS else asked.choice,
            parallel_tool_calls=asked.parallel,
            text=schema and {"format": schema},
            max_output_tokens=asked.max_tokens,
        )

    def _items(self, role: str, parts: list[Part]) -> list[Table]:
        kind = "output_text" if role == "assistant" else "input_text"
        texts = [{"type": kind, "text": own} for own in of_kind(parts, str)]
        items: list[Table] = [{"type": "message", "role": role, "content": texts}] if texts else []
        for name, own in of_kind(parts, Call):
            called = {"name": name, "arguments": json.dumps(own)}
            items.append({"type": "function_call", "call_id": f"call_{name}", **called})
        for name, text in of_kind(parts, Result):
            items.append({"type": "function_call_output", "call_id": f"call_{name}", "output": text})
        return items

    def put_together(self, answer: Answer) -> Table:
        """Each piece of the stream must fit the others."""
        events, output = typed_events(answer), list[Table]()
        for number, event in enumerate(events):
            kind = event["type"].removeprefix("response.")
            assert event["sequence_number"] == number
            if kind == "output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
                text = ""
            elif kind.endswith(".delta"):
                assert (event["item_id"], event["output_index"]) == (output[-1]["id"], len(output) - 1)
                text += event["delta"]
            elif kind.endswith(("_text.done", "arguments.done")):
                assert event["text" if "text" in event else "arguments"] == text
            elif kind == "content_part.done":
                assert event["part"]["text"] == text
            elif kind == "output_item.done":
                assert event["item"]["id"] == output[-1]["id"]
                output[-1] = event["item"]
            else:
                assert kind in ("created", "in_progress", "content_part.added", "completed", "incomplete")
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        response: Table = events[-1]["response"]
        assert events[-1]["type"] == f"response.{response['status']}"
        assert response["output"] == output
        return response

    def read(self, found: Table) -> Said:
        distinct([own["id"] for own in found["output"]])
        reason = (found["incomplete_details"] or {}).get("reason", found["status"])
        usage = found["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return Said(
            [self._part(own) for own in found["output"]], reason, (usage["input_tokens"], usage["output_tokens"])
        )

    def _part(self, item: Table) -> Part:
        if item["type"] == "function_call":
            return Call(item["name"], json.loads(item["arguments"]))
        text = "".join(own["text"] for own in item["content"])
        return Thought(text) if item["type"] == "reasoning" else text

    def last_error(self, answer: Answer) -> Any:
        *_, last = typed_events(answer)
        assert last["type"] == "response.failed"
        return last["response"]["error"]["code"]


class Ollama(Interface):
    """/api/chat, or /api/generate."""

    has_blocks = False
    ping = b" "
    lacks = frozenset({"choice", "parallel", "parts", "unknown"})
    reasons: ClassVar[dict[str, str]] = {"calls": "stop"}

    def __init__(self, path: str = "/api/chat"):
        self.path = path

    def _body(self, turns: Sequence[Turn], asked: Any, more: Table) -> Table:
        messages: list[Table] = []
        for role, *parts in turns:
            calls = [{"function": {"name": name, "arguments": own}} for name, own in of_kind(parts, Call)]
            own = {"role": role, "content": "".join(of_kind(parts, str)), **present(tool_calls=calls)}
            results = of_kind(parts, Result)
            messages += [{"role": "tool", "tool_name": name, "content": text} for name, text in results] or [own]
        return present(
            messages=messages,
            model=asked.model or "hermes",
            tools=[function(own) for own in asked.tools],
            format=asked.schema,
            options=more | present(stop=asked.stop, num_predict=asked.max_tokens),
        )

    def put_together(self, answer: Answer) -> Table:
        *streamed, last = lines(answer)
        message: Table = {}
        for line in [*streamed, last]:
            assert line["done"] is (line is last)
            said = {name: line[name] for name in ("response", "thinking") if name in line}
            for name, value in line.get("message", said).items():
                message[name] = value if name == "role" or name not in message else message[name] + value
        return last | ({"message": message} if "message" in last else message)

    def read(self, found: Table) -> Said:
        message = found.get("message") or found | {"content": found["response"]}
        calls = message.get("tool_calls", ())
        assert [own["function"]["index"] for own in calls] == [*range(len(calls))]
        distinct([own["id"] for own in calls])
        parts = [Thought(message.get("thinking", "")), message["content"]]
        parts += [Call(own["function"]["name"], own["function"]["arguments"]) for own in calls]
        return Said(joined(parts), found["done_reason"], (found["prompt_eval_count"], found["eval_count"]))

    def error(self, answer: Answer) -> str:
        assert set(answer.json) == {"error"}
        return str(answer.json["error"])

    def last_error(self, answer: Answer) -> Any:
        return [*lines(answer)[-1]]


CHAT, MESSAGES, RESPONSES, OLLAMA = INTERFACES = Chat(), Messages(), Responses(), Ollama()


def each_way(names: Iterable[str]) -> Any:
    """Each name with a chat, which has code for itself, and with one of the interfaces that have theirs in common."""
    names = list(names)
    pairs = [*zip(itertools.repeat(CHAT), names), *zip(itertools.cycle(INTERFACES[1:]), names)]
    return [pytest.param(talk, name, id=f"{type(talk).__name__}-{name}") for talk, name in pairs]
