"""/tokenize, /detokenize and /tokenizer_info are the model's tokenizer."""

from __future__ import annotations

from tests.serve.server.parrot import TEMPLATE
from tests.serve.server.running import Server

TEXTS = ["", "a", "import json\n", "naïve 🦜🏽 语言", "<|im_end|>", "<|endoftext|>", "a\x00b", " \t\n", "x" * 5000]


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


def test_a_token_behind_the_vocabulary_is_refused(parrot: Server) -> None:
    answer = parrot.post("/detokenize", {"tokens": [1, parrot.serving.engine.engine.vocab_size]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


def test_whoever_builds_prompts_is_told_how(parrot: Server) -> None:
    info = parrot.get("/tokenizer_info").json
    assert info["chat_template"] == TEMPLATE
    assert info["eos_token"] == "<|endoftext|>"
    assert info["model_max_length"] == 1024
    assert isinstance(info["tokenizer_class"], str)
