"""llama.cpp's interface, and filling in the middle in the words of each. The toy says its prompt again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from nanoengine.models.fill_in_middle import NAMES
from nanoengine.models.tokenizer import HFTokenizer
from tests.serve.server.conftest import MakeServer
from tests.serve.server.parrot import Parrot, build, save_tokenizer
from tests.serve.server.running import Server

PROMPT = "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
BOTH = {"input_prefix": "ab", "input_suffix": "cd"}


class Coder(Parrot):
    """Says what it was told before the middle, mark by mark, and then the middle: a mark ends it."""

    def _next(self, row: int, position: int) -> int:
        own = self.rows[row]
        said = [token for token in own.token_ids[: own.num_prompt] if token < 256]
        place = position - own.num_prompt
        return said[place] if place < len(said) else max(own.token_ids[: own.num_prompt])


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tokenizer(tmp_path_factory.mktemp("coder"))
    tokenizer = HFTokenizer(folder).hf
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(name) for name in NAMES[0]]})
    tokenizer.save_pretrained(folder)
    with closing(Server(build(folder, toy=Coder), "coder")) as server:
        yield server


def prompt_of(coder: Server, answer: Any) -> str:
    return coder.serving.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


def test_a_completion_with_a_suffix(coder: Server) -> None:
    request = {"prompt": "ab", "suffix": "cd", "max_tokens": 50, "return_token_ids": True}
    [choice] = coder.post("/v1/completions", request).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "stop")
    assert prompt_of(coder, choice) == PROMPT
    several = coder.post("/v1/completions", request | {"prompt": ["a", "b"]}).json["choices"]
    assert [own["text"] for own in several] == ["acd", "bcd"]


@pytest.mark.parametrize(
    ("changes", "field"), [({"prompt": [1, 2]}, "suffix"), ({"prompt": ["a", [1]]}, "suffix"), ({"echo": True}, "echo")]
)
def test_what_cannot_be_beside_a_suffix(coder: Server, changes: dict[str, Any], field: str) -> None:
    answer = coder.post("/v1/completions", {"prompt": "ab", "suffix": "cd"} | changes)
    assert (answer.status, answer.error["param"]) == (400, field)


def test_ollama(coder: Server) -> None:
    request = {"model": "coder", "prompt": "ab", "stream": False}
    assert coder.post("/api/generate", request | {"suffix": "cd"}).json["response"] == "abcd"
    raw = coder.post("/api/generate", request | {"raw": True, "options": {"num_predict": 2}}).json
    assert (raw["response"], raw["prompt_eval_count"]) == ("ab", 2)
    in_a_chat = coder.post("/api/generate", request | {"options": {"num_predict": 2}}).json
    assert in_a_chat["prompt_eval_count"] > 2
    assert coder.post("/api/generate", request | {"prompt": "", "suffix": "cd"}).json["response"] == "cd"


def test_a_model_without_a_chat_template_goes_on_with_a_prompt(make_server: MakeServer, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink()
    server = make_server({"folder": folder})
    asked = {"model": "parrot", "prompt": "ab", "stream": False}
    assert server.post("/api/generate", asked).json["response"] == "ab"
    assert server.post("/api/generate", asked | {"system": "S"}).json["response"] == "S\nab"
    refused = server.post("/api/chat", {"model": "parrot", "messages": [{"role": "user", "content": "a"}]})
    assert (refused.status, "has no chat template" in refused.json["error"]) == (400, True)


def test_infill(coder: Server) -> None:
    answer = coder.post("/infill", BOTH | {"cache_prompt": True, "samplers": ["top_k"], "n_predict": -1}).json
    said = {name: answer[name] for name in ("content", "stop", "stop_type", "tokens_evaluated", "tokens_predicted")}
    assert said == {"content": "abcd", "stop": True, "stop_type": "eos", "tokens_evaluated": 7, "tokens_predicted": 5}
    extra = [{"filename": "x.py", "text": "X"}]
    assert coder.post("/infill", BOTH | {"input_extra": extra, "prompt": "m"}).json["content"] == "x.py\nX\nabcdm"
    assert coder.post("/infill", BOTH | {"stop": ["c"]}).json["stopping_word"] == "c"
    assert coder.post("/infill", BOTH | {"n_predict": 2}).json["stop_type"] == "limit"


def test_infill_streams_what_it_says_whole(coder: Server) -> None:
    answer = coder.post("/infill", BOTH | {"stream": True})
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.body.splitlines() if line]
    assert "".join(event["content"] for event in events) == "abcd"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_editors_read_the_fields_that_they_name(coder: Server) -> None:
    """llama.vim names paths, and looks for each by its path; llama.vscode reads the context and asks for alternatives."""
    timings = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"]
    timings += [name.replace("prompt", "predicted") for name in timings]
    paths = ["content", *(f"timings/{name}" for name in timings), "truncated", "tokens_cached"]
    answer = coder.post("/infill", BOTH | {"response_fields": [*paths, "", "timings/none", "content/x"]}).json
    assert list(answer) == paths
    assert (answer["content"], answer["timings/predicted_n"]) == ("abcd", 5)
    whole = coder.post("/infill", BOTH | {"n_cmpl": 3, "t_max_predict_ms": 500}).json
    assert (whole["content"], whole["generation_settings"]["n_ctx"]) == ("abcd", coder.serving.max_model_len)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_goes_on(coder: Server, stream: bool) -> None:
    """What Continue sends."""
    fields = {"n_predict": 3, "top_k": 40, "temperature": 0, "min_p": 0.05, "mirostat": 0, "stop": ["z"]}
    answer = coder.post("/completion", {"prompt": "abcdef", "stream": stream, **fields})
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.body.splitlines() if line]
    assert "".join(event["content"] for event in events) == "abc"
    assert events[-1].items() >= {"stop": True, "stop_type": "limit", "tokens_predicted": 3}.items()


def test_a_text_has_a_schema(demo: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    answer = demo.post("/completion", {"prompt": "x = ", "json_schema": schema, "n_predict": 60}).json
    assert json.loads(answer["content"]) == {"a": 1}


def test_clients_ask_for_the_context(coder: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder.serving, "defaults", {"temperature": 0.8, "repetition_penalty": 1.1})
    length = coder.serving.max_model_len
    props = coder.get("/props?model=coder&autoload=false").json
    assert props["default_generation_settings"] == {
        "n_ctx": length,
        "params": {"temperature": 0.8, "repeat_penalty": 1.1},
    }
    assert props["chat_template"] == coder.get("/tokenizer_info").json["chat_template"]
    assert coder.get("/v1/models").json["data"][0]["meta"] == {"n_ctx": length}


def test_a_prompt_is_computed_ahead(coder: Server) -> None:
    """Editors send a file before anybody types, with n_predict 0."""
    ahead = {"input_prefix": "one two three", "input_suffix": "four", "n_predict": 0}
    answer = coder.post("/infill", ahead).json
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    again = coder.post("/infill", ahead | {"n_predict": 1}).json
    assert again["tokens_cached"] >= 16
