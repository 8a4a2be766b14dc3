"""What cannot be is refused by the name of its field, in the shape of the interface that was called."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.serve.server.bodies.fields import Body
from nanoengine.serve.server.http.endpoints import ENDPOINTS
from tests.serve.server.conftest import LIMITS
from tests.serve.server.interfaces import MESSAGES, OLLAMA
from tests.serve.server.running import Server
from tests.serve.server.weather import PLACE, WEATHER

Row = tuple[dict[str, Any], str | None, str]
"""Fields beside those that the path needs, the field that is named, and words of the message."""

USER = {"role": "user", "content": "a"}
ROBOT = {"role": "robot", "content": "x"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
BOTH = {"tools": [WEATHER, NOW]}
FLAT = [{"type": "function", "name": "weather", "parameters": PLACE}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:"}
HOLES = "no tokens for filling in the middle, such as <|fim_prefix|>"

# A schema that cannot be, in every field that may have one.
BAD = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
FORMAT = {"type": "json_schema", "name": "x", "schema": BAD}
FINE = {"type": "function", "function": {"name": "fine", "parameters": {"type": "object"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD, "strict": True}}
BAD_FLAT = {"type": "function", "name": "f", "parameters": BAD}
REQUIRED = {"tool_choice": "required"}


def with_name(field: str, fields: dict[str, Any], param: str | None = None) -> Row:
    """A row for a bad schema, which is called as the client calls the field."""
    return fields, param, f"{field}: Unknown format: colour"


def messages(*turns: Any) -> dict[str, Any]:
    return {"messages": [*turns]}


def parts(*own: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": [*own]})


NO_PARTS: list[Any] = [{"type": "text"}, {"type": "text", "text": 5}, 5, None, []]
NO_PARTS += [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
NO_PARTS += [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
NO_MESSAGES: list[Any] = [[], {}, "Hello", None, [5], [[]], ["Hello"], [{}], [{"role": "user"}], [{"content": "x"}]]
NO_MESSAGES += [[{"role": "user", "content": content}] for content in (None, 5)]
NO_TOKENS: list[Any] = [[-1], [10**6], [2**31], ["a"], [1.5], None, "ab", [True], [None]]

NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": messages(USER),
    "/v1/messages": messages(USER) | {"max_tokens": 4},
    "/v1/responses": {"input": "x"},
    "/api/chat": messages(USER) | {"model": "demo"},
    "/api/generate": {"model": "demo", "prompt": "x"},
    "/infill": {"input_prefix": "ab", "input_suffix": "cd"},
    "/v1/embeddings": {"input": "a"},
}
"""Fields of each path without which nothing is answered."""

ROWS: dict[str, list[Row]] = {
    "/v1/completions": [
        ({"guided_regex": "a"}, "guided_regex", 'give structured_outputs {"regex": ...}'),
        ({"suffix": "b"}, None, HOLES),
        with_name("response_format", {"response_format": OF_OPENAI}, "response_format"),
        with_name("structured_outputs.json", {"structured_outputs": {"json": BAD}}),
        with_name("json_schema", {"json_schema": BAD}, "json_schema"),
    ],
    "/v1/chat/completions": [
        *(({"messages": own}, None, "") for own in NO_MESSAGES),
        *((parts(own), None, "part") for own in NO_PARTS),
        (messages(USER, ROBOT), "messages", "messages[1]: role is 'robot'"),
        (messages(USER, CALLED, {"role": "tool", "tool_call_id": "2", "content": "x"}), "messages", "'2'"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"guided_json": {}}, "guided_json", 'guided_json is not supported: give structured_outputs {"json": ...}'),
        ({"functions": [{"name": "f"}]}, "functions", "give tools"),
        ({"include_usage": True}, "include_usage", "give stream_options.include_usage"),
        ({"temprature": 0}, "temprature", "leave it out; did you mean 'temperature'?"),
        (BOTH | {"tool_choice": "any"}, "tool_choice", "auto"),
        ({"tools": [5]}, "tools", ""),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tools": [NOW, NOW]}, "tools", "unique name"),
        (BOTH | REQUIRED | {"structured_outputs": {"regex": "a"}}, "tool_choice", "structured"),
        ({"tools": [{"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}]} | REQUIRED, "tools", '"not"'),
        (
            {"tools": [{"name": "f", "strict": True, "parameters": {"properties": {"a": {"uniqueItems": True}}}}]},
            "tools",
            "uniqueItems",
        ),
        with_name("response_format", {"response_format": OF_OPENAI}, "response_format"),
        with_name("tools[1].function.parameters", {"tools": [FINE, BAD_TOOL]}, "tools"),
        with_name("tools[0].parameters", {"tools": [BAD_FLAT]} | REQUIRED, "tools"),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, None, "max_tokens"),
        ({"max_tokens": 0}, None, "max_tokens"),
        (messages(), None, "messages"),
        ({"stop_sequences": [""]}, None, "stop_sequences"),
        ({"mcp_servers": [{}]}, None, "mcp_servers"),
        ({"thinking": {"type": "much"}}, None, "thinking"),
        ({"enable_thinking": False}, None, "give thinking"),
        ({"stop": ["a"]}, None, "give stop_sequences"),
        ({"effort": "low"}, None, "give output_config.effort"),
        (parts(IMAGE), None, "messages[0].content[0]: blocks of type 'image'"),
        (parts({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), None, "'image'"),
        (parts({"type": "tool_result"}), None, "tool_use_id"),
        (parts(5), None, "blocks"),
        (messages({"role": "tool", "content": "x"}), None, "role"),
        (messages({"role": "assistant", "content": [{"type": "server_tool_use"}]}), None, "server_tool_use"),
        (messages({"role": "assistant", "content": [{"type": "tool_use", "id": 5}]}), None, "content[0].id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, None, "web_search_20250305"),
        ({"tools": [{"input_schema": {}}]}, None, "name"),
        ({"tools": [{"name": "f", "input_schema": PLACE}], "tool_choice": {"type": "some"}}, None, "tool_choice"),
        with_name("output_format", {"output_format": FORMAT}),
        with_name("output_config.format", {"output_config": {"format": FORMAT}}),
        with_name(
            "tools[0].input_schema", {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}}
        ),
    ],
    "/v1/responses": [
        ({"input": None}, "input", "input"),
        ({"input": ""}, "input", "input"),
        ({"input": [ROBOT]}, "input", "input[0]: role is 'robot'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "give input with all items"),
        ({"background": True}, "background", "background"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        ({"conversation": "c"}, "conversation", "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"top_k": -2}, "top_k", "top_k"),
        ({"repetition_penalty": 9}, "repetition_penalty", "repetition_penalty"),
        ({"max_tokens": 4}, "max_tokens", "give max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "give text.format"),
        ({"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "input", "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools", "code_interpreter"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tools": FLAT, "tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format", "schema"),
        with_name("text.format", {"text": {"format": FORMAT}}, "text"),
        with_name("tools[1].parameters", {"tools": [{"type": "web_search"}, BAD_FLAT]} | REQUIRED, "tools"),
        with_name(
            "tools[0].tools[0].parameters",
            {"tools": [{"type": "namespace", "name": "n", "tools": [BAD_FLAT]}]} | REQUIRED,
            "tools",
        ),
    ],
    "/api/chat": [
        ({"options": {"mirostat": 2}}, None, "options.mirostat is not supported: leave it out"),
        ({"temperature": -1}, None, "temperature"),
        ({"options": {"repeat_penalty": -1}}, None, "repeat_penalty"),
        ({"format": "xml"}, None, "xml"),
        (messages(USER | {"images": ["x"]}), None, "images"),
        (messages({"content": "x"}), None, "role"),
        (messages({"role": "assistant", "tool_calls": [{}]}), None, "tool_calls[0]"),
        with_name("format", {"format": BAD}),
        with_name("tools[0].function.parameters", {"tools": [BAD_TOOL]}),
    ],
    "/api/generate": [
        ({"images": ["x"]}, None, "images"),
        ({"context": [1]}, None, "context"),
        ({"suffix": "b"}, None, HOLES),
        with_name("format", {"format": BAD}),
    ],
    "/api/show": [({}, None, "model")],
    "/infill": [({}, None, HOLES)],
    "/completion": [({"prompt": own}, "prompt", "") for own in (None, "", ["a"], [1, 2], "a" * 500_000)],
    "/v1/embeddings": [
        ({"input": ""}, "input", "input"),
        ({"input": []}, "input", "input"),
        ({"input": [[]]}, "input", "input"),
        ({"input": [1, "a"]}, "input", "input"),
        ({"input": ["a"] * (LIMITS["max_prompts"] + 1)}, "input", "input"),
        ({"input": [-1]}, "input", "input"),
        ({"input": [10**6]}, "input", "the prompt holds"),
        ({"input": "a " * 5000}, "input", "the prompt"),
        ({"input": None}, "input", "input"),
        ({"dimensions": 10**6}, "dimensions", "dimensions"),
        ({"dimensions": 0}, "dimensions", "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"temperature": 1.0}, "temperature", "temperature"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ],
    "/tokenize": [
        *((own, "prompt", "") for own in ({}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]})),
        *((own | {"prompt": "a"}, "prompt", "give one") for own in ({"content": "a"}, messages(USER))),
        ({"content": "x" * 5} | messages(USER), "prompt", "give one"),
        (messages(), "messages", ""),
        (messages(ROBOT), "messages", "messages[0]: role is 'robot'"),
        (messages(USER) | {"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template", "chat_template"),
    ],
    "/detokenize": [({"tokens": own}, "tokens", "") for own in NO_TOKENS],
}


@pytest.mark.parametrize("path", ROWS)
def test_what_cannot_be_is_refused_by_its_name(demo: Server, path: str) -> None:
    [kind] = [endpoint.body for endpoint in ENDPOINTS if endpoint.path == path]
    assert kind is not None
    assert issubclass(kind, Body)
    for fields, param, words in ROWS[path]:
        for stream in [{}, {"stream": True}] if "stream" in kind.__struct_fields__ else [{}]:
            answer = demo.post(path, NEEDED.get(path, {}) | fields | stream)
            assert answer.status == 400, (fields, answer.body)
            if path.startswith("/api/"):
                message = OLLAMA.error(answer)
            else:
                message = MESSAGES.error(answer) if path == MESSAGES.path else answer.error["message"]
            assert words in message, (fields, message)
            assert param is None or answer.error["param"] == param, (fields, answer.body)
