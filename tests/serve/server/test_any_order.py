"""Schemas as libraries write them, by every interface: properties in the order of the model, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoengine import SamplingParams
from tests.scripted import folder_of, scripted_llm
from tests.serve.server import interface
from tests.serve.server.interface import Call, Interface
from tests.serve.server.test_thinking import USER, Serve, each_talk, says, serve

PERSON: dict[str, Any] = {
    "$defs": {"Pet": {"type": "object", "properties": {"name": {"type": "string"}, "old": {"type": "boolean"}}}},
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "nickname": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}, "default": []},
    },
    "required": ["name"],
}
"""As pydantic writes a class."""

RIGHT = {"pets": [{"old": True, "name": "Rex"}, {}], "nickname": "Bob", "name": "Robert"}
WRONG = '{"nickname ": "Bob", "name": "Robert"}'

__all__ = ["serve"]


@each_talk
def test_an_answer_has_the_model_s_order_and_no_other_names(serve: Serve, talk: Interface) -> None:
    server, script = serve("qwen2.5")
    script.text = json.dumps(RIGHT)
    assert says(talk.ask(server, [USER], schema=PERSON, max_tokens=200, model="scripted"), json.dumps(RIGHT))
    script.text = WRONG
    [text] = talk.ask(server, [USER], schema=PERSON, max_tokens=200, model="scripted").parts
    assert "nickname " not in str(text)
    script.text = WRONG
    open_schema = PERSON | {"additionalProperties": True}
    assert says(talk.ask(server, [USER], schema=open_schema, max_tokens=200, model="scripted"), WRONG)


@each_talk
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-coder"])
def test_forced_arguments_have_the_model_s_order(
    serve: Serve, talk: Interface, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "choice" in talk.lacks:
        pytest.skip("forces no calls")
    monkeypatch.setitem(interface.TOOLS, "now", PERSON)
    server, script = serve(name)
    if name == "qwen2.5":
        script.text = f'<tool_call>\n{{"name": "now", "arguments": {json.dumps(RIGHT)}}}\n</tool_call>'
    else:
        values = {"pets": json.dumps(RIGHT["pets"]), "nickname": "Bob", "name": "Robert"}
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        script.text = f"<tool_call>\n<function=now>\n{inner}</function>\n</tool_call>"
    said = talk.ask(server, [USER], tools=("now",), choice="now", max_tokens=300, model="scripted")
    assert says(said, Call("now", RIGHT))
    [call] = said.parts
    assert isinstance(call, Call)
    assert list(call.arguments) == list(RIGHT)


def test_structural_tags_have_the_model_s_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f>"]}
    llm, script = scripted_llm(folder_of(tmp_path_factory.mktemp("tags"), "qwen2.5"))
    script.text = f"So: <f>{json.dumps(RIGHT)}</f>"
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs={"structural_tag": tag})
    assert llm.generate("a", params)[0].outputs[0].text == script.text
    llm.close()
