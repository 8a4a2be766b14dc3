"""Ollama's interface: what its clients send, and what they are told. The toy says what it hears."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.models.fill_in_middle import FillTokens
from nanoengine.models.names import DEMO
from nanoengine.serve.server.apis.ollama.chat import OllamaWriter
from nanoengine.serve.server.apis.writer import Usage
from nanoengine.serve.server.model_card import ModelCard
from tests.serve.server.interface import Thought
from tests.serve.server.interfaces import OLLAMA, Ollama
from tests.serve.server.running import Server
from tests.serve.server.weather import PLACE

GENERATE = Ollama("/api/generate")


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [own if isinstance(own, dict) else {"role": "user", "content": own} for own in messages]
    return {"model": "hermes", "messages": turns, **fields}


def test_what_only_this_interface_has(hermes: Server) -> None:
    """Fields that say nothing, and options at values that change nothing."""
    neutral = {
        "typical_p": 1.0,
        "tfs_z": 1,
        "mirostat": 0,
        "xtc_probability": 0,
        "repeat_last_n": 64,
        "num_predict": -1,
    }
    fields = {"options": neutral | {"num_gpu": 1, "num_ctx": 9, "newer": None}, "keep_alive": "5m", "think": False}
    for own in ({}, {"options": None}, {"think": True}, {"options": {"num_predict": 0}}, fields):
        assert OLLAMA.said(hermes, chat("Hello.", **own)).parts == ["Hello."]


def test_a_prompt_is_answered(hermes: Server) -> None:
    request = {"model": "hermes:latest", "prompt": "b", "system": "a"}
    assert GENERATE.said(hermes, request).parts == ["ab"]
    answer = hermes.post(GENERATE.path, request | {"stream": False}).json
    assert (answer["model"], answer["done"]) == ("hermes:latest", True)
    assert GENERATE.said(hermes, {"model": "hermes", "prompt": "<think>Hm.</think>Yes."}).parts == [
        Thought("Hm."),
        "Yes.",
    ]


@pytest.mark.parametrize("format", ["json", PLACE])
def test_the_text_has_a_format(demo: Server, format: Any) -> None:
    options = {"temperature": 0, "num_predict": 600}
    [text] = GENERATE.said(demo, {"model": "demo", "prompt": "A city.", "format": format, "options": options}).parts
    if format != "json":
        assert json.loads(text)["city"] in ("Rome", "Oslo")
    assert text[0] == "{"


@pytest.mark.parametrize(("path", "said"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_who_says_nothing_loads_or_unloads_the_model(hermes: Server, path: str, said: str) -> None:
    reasons: dict[Any, str] = dict.fromkeys((0, "0s"), "unload") | dict.fromkeys(("5m", -1, None), "load")
    for keep_alive, reason in [*reasons.items(), (0.0, "unload")]:
        answer = hermes.post(path, {"model": "hermes", "keep_alive": keep_alive}).json
        assert (answer["done"], answer["done_reason"], said in answer) == (True, reason, True)
    assert hermes.post(path, {"model": "other"}).status == 404


def test_penalties_of_no_token_are_none(demo: Server) -> None:
    def said(**options: Any) -> str:
        options |= {"temperature": 0, "num_predict": 24}
        asked = {"model": "demo", "prompt": "def f(", "options": options, "stream": False}
        return str(demo.post(GENERATE.path, asked).json["response"])

    assert said(repeat_penalty=1.8) != said()
    assert said(repeat_penalty=1.8, repeat_last_n=0) == said()


LONG = "0123456789"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_predict": 3}, "012"),
        ({"max_output_tokens": 3, "top_p": 0.9, "tool_choice": "auto", "user": "me"}, "012"),  # ollama-ai-provider-v2
        ({"max_tokens": 3, "stop": [], "echo": True, "frequency_penalty": 0.1}, "012"),  # its completions
        ({"max_tokens": 3, "options": {"num_predict": 5}}, "01234"),
        ({"num_predict": 3, "options": {"max_completion_tokens": 5}}, "01234"),
        ({"max_tokens": 3, "num_predict": 5}, "01234"),
        ({"stop_sequences": ["4"]}, "0123"),
        ({"stop": ["4"], "options": {"stop": "3"}}, "012"),
    ],
    ids=str,
)
def test_options_beside_options_and_by_other_names(hermes: Server, fields: dict[str, Any], said: str) -> None:
    assert OLLAMA.said(hermes, chat(LONG, temperature=0, **fields)).parts == [said]


def test_clients_are_told_how_they_are_sampled_if_they_say_nothing(
    hermes: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hermes.serving, "defaults", {"temperature": 0.8, "repetition_penalty": 1.1, "top_k": 40})
    shown = hermes.post("/api/show", {"model": "hermes"}).json
    assert shown["parameters"].split("\n") == ["temperature 0.8", "top_k 40", "repeat_penalty 1.1"]


def test_what_clients_ask_before(hermes: Server) -> None:
    shown = hermes.post("/api/show", {"model": "hermes", "verbose": True}).json
    assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    assert shown["model_info"]["parrot.context_length"] == 4096
    assert shown["parameters"] == ""
    assert hermes.post("/api/show", {"name": "hermes"}).json == shown
    assert set(hermes.get("/api/version").json) == {"version"}


def test_what_a_model_is(demo: Server) -> None:
    [listed], [running] = (demo.get(path).json["models"] for path in ("/api/tags", "/api/ps"))
    shown = demo.post("/api/show", {"model": "demo"}).json
    size = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    assert (listed["name"], listed["model"], listed["size"]) == ("demo", "demo", size)
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"])
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "4.74M",
    }
    assert listed["details"] == shown["details"] == {**details, "quantization_level": "BF16"}
    length = demo.serving.max_model_len
    assert listed.items() <= running.items()
    assert (running["context_length"], running["size_vram"]) == (length, 0)
    for moment in (listed["modified_at"], shown["modified_at"], running["expires_at"]):
        assert datetime.fromisoformat(moment).tzinfo is not None
    assert shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == length
    assert shown["model_info"]["general.parameter_count"] == 4_738_432


def test_what_a_gguf_file_is(tmp_path: Path) -> None:
    parts = [tmp_path / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in (*parts, tmp_path / "b.gguf"):
        part.write_bytes(b"GGUF" + bytes(6))
    config = SimpleNamespace(num_layers=28, hidden_size=3584)
    metadata = {"general.architecture": "qwen2", "general.file_type": 15}
    own: Any = {"model_config": config, "num_parameters": 7_615_616_512, "metadata": metadata, "quantization": None}
    models: Any = SimpleNamespace(checkpoint=SimpleNamespace(location=str(parts[0])), **own)
    card = ModelCard.of(models)
    assert (card.size, card.details["format"], card.details["family"]) == (20, "gguf", "qwen2")
    assert (card.details["parameter_size"], card.details["quantization_level"]) == ("7.6B", "Q4_K_M")
    parts[1].write_bytes(b"GGUF" + bytes(7))
    assert ModelCard.of(models).digest != card.digest


def test_a_model_that_fills_holes_says_so(hermes: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(hermes.serving.prompts), "fill_tokens", FillTokens("<a>", "<b>", "<c>", "", ()))
    assert "insert" in hermes.post("/api/show", {"model": "hermes"}).json["capabilities"]


def test_a_whole_answer_says_when_its_first_token_was_there() -> None:
    writer = OllamaWriter("parrot", is_chat=False)
    writer.ttft = 0.0
    [last] = writer.end("stop", None, Usage(3, 0, 5))
    assert last["prompt_eval_duration"] == 0
    assert last["eval_duration"] == last["total_duration"]
