"""/v1/chat/completions: conversations in the model's template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine import LLM
from tests.serve.server.conftest import MakeServer
from tests.serve.server.events import text_of
from tests.serve.server.parrot import save_tokenizer
from tests.serve.server.running import Server, in_thread

USER = {"role": "user", "content": "Write a function."}


GREEDY = "{% if 'x' in messages[0].content %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"


def test_a_template_that_takes_too_much_ends_its_own_requests(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server({"folder": save_tokenizer(tmp_path, GREEDY)})
    asked = [in_thread(server.chat, text, max_tokens=2) for text in ("x", "ab", "x", "cd")]
    statuses = [answer.result().status for answer in asked]
    assert statuses == [400, 200, 400, 200]
    assert "the chat template takes more than 1024 MiB" in asked[0].result().error["message"]


def prompt_of(server: Server, *contents: Any, **fields: Any) -> str:
    """The text that the model is given."""
    answer = server.chat(*contents, max_tokens=1, return_prompt_text=True, **fields)
    assert answer.status == 200, answer.body
    return str(answer.json["prompt_text"])


# ---- the answer


def test_the_answer_is_that_of_the_engine(demo: Server, demo_llm: LLM) -> None:
    params = replace(demo_llm.get_default_sampling_params(), max_tokens=10, temperature=0.8, seed=3, n=2)
    output = demo_llm.chat([USER], params, use_tqdm=False)[0]
    answer = demo.chat(USER, max_tokens=10, temperature=0.8, seed=3, n=2).json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "demo"
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    for choice, own in zip(answer["choices"], output.outputs, strict=True):
        assert choice["message"] == {"role": "assistant", "content": own.text, "refusal": None, "reasoning": None}
        assert (choice["index"], choice["finish_reason"]) == (own.index, own.finish_reason)


def test_the_newer_name_of_max_tokens_wins(parrot: Server) -> None:
    answer = parrot.chat("abcdef", max_tokens=9, max_completion_tokens=2)
    assert answer.json["usage"]["completion_tokens"] == 2
    assert parrot.chat("a", max_completion_tokens=5000).error["param"] == "max_completion_tokens"
    assert parrot.chat("a", max_tokens=5000).error["param"] == "max_tokens"


def test_an_answer_is_as_long_as_fits_unless_it_is_said(parrot: Server) -> None:
    answer = parrot.chat("a" * 700, ignore_eos=True).json
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


# ---- the conversation


def test_a_message_may_be_gone_on_with_and_echoed(parrot: Server) -> None:
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nWell, "
    assert prompt_of(parrot, "Hello", "Well, ", **going_on) == prompt
    tokens = parrot.post("/tokenize", {"prompt": prompt}).json["tokens"]
    text = "Well, " + parrot.serving.tokenizer.decode(tokens[:5])
    for last in ("Well, ", {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}):
        fields = {**going_on, "echo": True, "max_tokens": 5}
        message = parrot.chat("Hello", last, **fields).json["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", text)
        assert text_of(parrot.chat("Hello", last, **fields, stream=True).events) == text
    refused = parrot.chat("Hello", "Well, ", continue_final_message=True)
    assert (refused.status, refused.error["param"]) == (400, "continue_final_message")


def test_the_prompt_may_be_told(parrot: Server) -> None:
    answer = parrot.chat("Hello", max_tokens=2, return_token_ids=True, return_prompt_text=True).json
    tokens = parrot.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}).json["tokens"]
    assert answer["prompt_token_ids"] == tokens
    assert parrot.serving.tokenizer.encode(answer["prompt_text"], add_special_tokens=False) == tokens
    fields = {"return_token_ids": True, "return_prompt_text": True, "stream": True}
    first = parrot.chat("Hello", max_tokens=2, **fields).events[0]
    assert (first["prompt_token_ids"], first["prompt_text"]) == (tokens, answer["prompt_text"])
