"""Two tools that tests of all interfaces tell a model of, and how the toy calls them."""

from __future__ import annotations

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
"""As chats have it, OpenAI's and Ollama's."""

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>{"name": "now"}</tool_call>'
