"""/v1/responses: what OpenAI's newer clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from nanoengine.serve.server.apis.openai.response_items import turns
from tests.serve.server.interface import Part, Thought
from tests.serve.server.interfaces import RESPONSES
from tests.serve.server.running import Server
from tests.serve.server.weather import PLACE, ROME, TIME

WEATHER = {"type": "function", "name": "weather", "parameters": PLACE, "strict": False}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": None}
TOOLS = [WEATHER, NOW]
PATH = "/v1/responses"


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'}


def said(server: Server, **request: Any) -> list[Part]:
    return RESPONSES.said(server, request).parts


@pytest.mark.parametrize(
    ("request_body", "parts"),
    [
        ({"input": "b", "instructions": "a"}, ["ab"]),
        ({"input": [message("developer", "a"), {"role": "user", "content": "b"}]}, ["ab"]),
        ({"input": "x", "tools": [{"type": "web_search", "external_web_access": False}]}, ["x"]),
        (
            {
                "input": "x",
                "reasoning": {"effort": None, "summary": "auto"},
                "prompt_cache_key": "k",
                "service_tier": "auto",
            },
            ["x"],
        ),
    ],
    ids=str,
)
def test_what_only_this_interface_has(hermes: Server, request_body: dict[str, Any], parts: list[Part]) -> None:
    assert said(hermes, **request_body) == parts


def test_what_others_have_added_is_taken(hermes: Server, demo: Server) -> None:
    """As vLLM has it."""
    fields: dict[str, Any] = {"input": "def f(", "max_output_tokens": 12}
    greedy = said(demo, **fields, temperature=0)
    assert said(demo, **fields, temperature=1.5, top_k=1) == greedy
    assert said(demo, **fields, temperature=1.5, seed=3) != greedy
    assert said(hermes, input="Hm.</think>Yes.", chat_template_kwargs={"begun": True})[0] == Thought("Hm.")


def test_a_conversation_goes_on_with_the_items_of_an_answer(hermes: Server) -> None:
    asked = message("user", TIME)
    first = hermes.post(PATH, {"input": [asked], "tools": [NOW]}).json
    [item] = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Noon."}
    assert said(hermes, input=[asked, *first["output"], output]) == [f"{TIME}Told.Noon."]


def test_items_of_two_answers_have_ids_of_their_own(hermes: Server) -> None:
    """Clients know items by their ids."""
    ids = [hermes.post(PATH, {"input": "a"}).json["output"][0]["id"] for _ in range(2)]
    assert ids[0] != ids[1]


def test_thoughts_are_carried_by_clients(hermes: Server) -> None:
    request = {
        "input": f"<think>Hm.</think>{TIME}",
        "tools": [NOW],
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    first, *_ = hermes.post(PATH, request).json["output"]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": first["encrypted_content"]}
    for thought, known in ((sealed, "Hm."), (first, "Hm."), ({**sealed, "encrypted_content": "gAAAA~"}, None)):
        [own] = turns([thought, CALLED])
        assert own.get("reasoning_content") == known
        assert own["tool_calls"][0]["id"] == "a"


def test_tools_of_a_namespace_are_called_by_both_names(hermes: Server) -> None:
    tools = [{"type": "namespace", "name": "clock", "tools": [NOW]}]
    response = hermes.post(PATH, {"input": TIME.replace("now", "clock__now"), "tools": tools}).json
    [own] = [item for item in response["output"] if item["type"] == "function_call"]
    assert (own["name"], own["namespace"]) == ("now", "clock")


def test_openais_client(hermes: Server) -> None:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = TOOLS
        with client.responses.stream(model="hermes", input=f"<think>Hm.</think>Look.{ROME}", tools=tools) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
        [call] = [item for item in final.output if item.type == "function_call"]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        answer = client.responses.create(model="hermes", input=[*final.output, output], store=True)
        assert answer.output_text.endswith("Sunny.")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
