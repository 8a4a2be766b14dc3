"""/tokenize, /detokenize and /tokenizer_info are the model's tokenizer."""

from __future__ import annotations

from typing import Any

from tests.serve.server.parrot import TEMPLATE
from tests.serve.server.running import Server

TEXTS = ["", "a", "import json\n", "naïve 🦜🏽 语言", "<|im_end|>", "<|endoftext|>", "a\x00b", " \t\n", "x" * 5000]
USER = [{"role": "user", "content": "a"}]


def test_a_text_comes_back(parrot: Server) -> None:
    for text in TEXTS:
        answer = parrot.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 1024
        assert answer["tokens"] == parrot.serving.tokenizer.encode(text)
        assert parrot.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text, "content": text}
        of_llama = {"content": text, "add_special": False, "parse_special": True, "with_pieces": False}
        assert parrot.post("/tokenize", of_llama).json["tokens"] == parrot.serving.tokenizer.encode(
            text, add_special_tokens=False
        )


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
        rendered = parrot.post("/apply-template", {"messages": messages, **fields}).json["prompt"]
        assert parrot.post("/tokenize", {"content": rendered}).json["tokens"] == tokens
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = parrot.post("/tokenize", {"messages": messages, "tools": tools}).json
    named = parrot.post("/tokenize", {"messages": messages, "chat_template_kwargs": {"name": "critic"}}).json
    assert parrot.post("/detokenize", {"tokens": with_tools["tokens"]}).json["prompt"].startswith('[{"type"')
    assert parrot.post("/detokenize", {"tokens": named["tokens"]}).json["prompt"].endswith("critic\n")


NO_PROMPTS: list[dict[str, Any]] = [{}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]}, {"messages": []}]
NO_PROMPTS += [{"prompt": "a", "content": "a"}, {"content": "x" * 5, "messages": USER}]
NO_PROMPTS += [{"prompt": "a", "messages": USER}, {"prompt": "a", "chat_template": "x"}]
NO_PROMPTS += [{"messages": USER, "continue_final_message": True}, {"prompt": "a", "model": "other"}]


def test_what_is_no_text_and_no_token_is_refused(parrot: Server) -> None:
    for body in NO_PROMPTS:
        answer = parrot.post("/tokenize", body)
        assert answer.status == (404 if "model" in body else 400), body
        assert answer.error["message"]
    behind = parrot.serving.engine.engine.vocab_size
    for tokens in ([1, behind], [-1], [10**6], [2**31], ["a"], [1.5], None, "ab", [True], [None]):
        answer = parrot.post("/detokenize", {"tokens": tokens})
        assert (answer.status, answer.error["param"]) == (400, "tokens"), tokens


def test_whoever_builds_prompts_is_told_how(parrot: Server) -> None:
    info = parrot.get("/tokenizer_info").json
    assert info["chat_template"] == TEMPLATE
    assert info["eos_token"] == "<|endoftext|>"
    assert info["model_max_length"] == 1024
    assert isinstance(info["tokenizer_class"], str)
