"""/tokenize, /detokenize and /tokenizer_info are the model's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.parrot import TEMPLATE
from tests.server.running import Server

TEXTS = ["", "a", "import json\n", "naïve 🦜🏽 语言", "<|im_end|>", "a\x00b", " \t\n", "x" * 5000]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_a_text_comes_back(parrot: Server, text: str) -> None:
    answer = parrot.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    assert answer["tokens"] == parrot.serving.tokenizer.encode(text)
    assert parrot.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text}


def test_messages_are_what_a_chat_would_be(parrot: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well"}]
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        tokens = parrot.post("/tokenize", {"messages": messages, **fields}).json["tokens"]
        answer = parrot.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
        )
        assert answer.json["prompt_token_ids"] == tokens
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = parrot.post("/tokenize", {"messages": messages, "tools": tools}).json
    named = parrot.post("/tokenize", {"messages": messages, "chat_template_kwargs": {"name": "critic"}}).json
    assert parrot.post("/detokenize", {"tokens": with_tools["tokens"]}).json["prompt"].startswith('[{"type"')
    assert parrot.post("/detokenize", {"tokens": named["tokens"]}).json["prompt"].endswith("critic\n")


def test_a_token_outside_the_vocabulary_has_no_text(parrot: Server) -> None:
    answer = parrot.post("/detokenize", {"tokens": [1, parrot.serving.engine.engine.vocab_size]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        {"prompt": 5},
        {"prompt": ["a"]},
        {"messages": []},
        {"prompt": "a", "chat_template": "x"},
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
        {"prompt": "a", "model": "other"},
    ],
    ids=str,
)
def test_what_cannot_be_tokenized_is_refused(parrot: Server, body: dict[str, Any]) -> None:
    answer = parrot.post("/tokenize", body)
    assert answer.status == (404 if "model" in body else 400)
    assert answer.error["message"]


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**31], ["a"], [1.5], None, "ab", [True], [None]], ids=str)
def test_what_is_no_token_is_refused(parrot: Server, tokens: Any) -> None:
    answer = parrot.post("/detokenize", {"tokens": tokens})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


def test_special_tokens_are_text_too(parrot: Server) -> None:
    eos = parrot.serving.tokenizer.eos_token_id
    assert parrot.post("/detokenize", {"tokens": [eos]}).json == {"prompt": "<|endoftext|>"}
    assert parrot.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_whoever_builds_prompts_is_told_how(parrot: Server) -> None:
    info = parrot.get("/tokenizer_info").json
    assert info["chat_template"] == TEMPLATE
    assert info["eos_token"] == "<|endoftext|>"
    assert info["model_max_length"] == 1024
    assert isinstance(info["tokenizer_class"], str)
