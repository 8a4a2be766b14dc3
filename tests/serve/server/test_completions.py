"""/v1/completions: what the engine makes, whatever the prompts and the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM
from tests.serve.server.conftest import MakeServer
from tests.serve.server.events import choices_of
from tests.serve.server.running import Server
from tests.serve.server.test_logprobs import sentencepiece
from tests.serve.server.test_streams import HARD, PROMPT


def usage(num_prompt: int, num_new: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


# ---- one prompt


def test_the_answer_is_that_of_the_engine(demo: Server, demo_llm: LLM) -> None:
    fields = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    params = replace(demo_llm.get_default_sampling_params(), **fields)
    output = demo_llm.generate(PROMPT, params, use_tqdm=False)[0]
    answer = demo.complete(PROMPT, **fields, return_token_ids=True).json
    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"] == usage(
        len(output.prompt_token_ids), 24, answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    for choice, own in zip(answer["choices"], output.outputs, strict=True):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (own.index, own.text, own.finish_reason)
        assert choice["token_ids"] == own.token_ids
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        assert own.logprobs is not None
        expected = [entry[token].logprob for entry, token in zip(own.logprobs, own.token_ids, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
        assert output.prompt_logprobs is not None
        for found, entry in zip(choice["prompt_logprobs"], output.prompt_logprobs, strict=True):
            assert (found is None) == (entry is None)
            if entry is not None:
                assert set(found) == set(map(str, entry))
                for token, value in entry.items():
                    assert found[str(token)]["logprob"] == pytest.approx(value.logprob, abs=1e-3)
                    assert found[str(token)]["rank"] == value.rank


# ---- prompts


def test_several_prompts_in_any_form_have_choices_in_order(parrot: Server) -> None:
    ids = parrot.post("/tokenize", {"prompt": "ids"}).json["tokens"]
    answer = parrot.complete(["one", ids, HARD], n=2, max_tokens=3, return_token_ids=True).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = ["one", "one", "ids", "ids", "naï"[:2] + "�", "naï"[:2] + "�"]
    assert [choice["text"] for choice in answer["choices"]] == texts
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["usage"] == usage(6 + len(HARD.encode()), 18, cached)
    for prompt in ("ids", ids, ["ids"], [ids]):
        [choice] = parrot.complete(prompt, max_tokens=3, return_token_ids=True).json["choices"]
        assert (choice["text"], choice["prompt_token_ids"]) == ("ids", ids)


def test_a_completion_ends_where_the_longest_sequence_does(parrot: Server) -> None:
    whole = parrot.complete("a" * 1000, max_tokens=900, ignore_eos=True).json
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["choices"][0]["finish_reason"] == "length"


# ---- log probabilities


def test_echoed_log_probabilities_are_those_of_the_prompt(demo: Server) -> None:
    ids = demo.post("/tokenize", {"prompt": PROMPT}).json["tokens"]
    answer = demo.complete(ids, echo=True, logprobs=1, max_tokens=1, temperature=0, prompt_logprobs=1).json
    [choice] = answer["choices"]
    logprobs, of_prompt = choice["logprobs"], choice["prompt_logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(ids) + 1)]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is of_prompt[0] is None
    for i, token in enumerate(ids[1:], start=1):
        assert logprobs["token_logprobs"][i] == of_prompt[i][str(token)]["logprob"]
        name = logprobs["tokens"][i]
        assert logprobs["top_logprobs"][i][name] == logprobs["token_logprobs"][i]
        assert set(logprobs["top_logprobs"][i]) == {entry["decoded_token"] for entry in of_prompt[i].values()}


@pytest.mark.parametrize("stream", [False, True])
def test_blanks_before_words_stay_where_they_are(make_server: MakeServer, tmp_path: Path, stream: bool) -> None:
    """Of a SentencePiece tokenizer, whose decoder drops the first one: in texts, names, offsets and bytes."""
    tokens = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}
    PreTrainedTokenizerFast(tokenizer_object=sentencepiece(True), **tokens).save_pretrained(tmp_path)
    server = make_server({"folder": tmp_path})
    for text in ("hello world th th", "th  th\n", "th 😀 日", "<s> th</s>th"):
        ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
        for prompt, start in ((text, text), (ids, None)):
            fields: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0, "stream": stream}
            answer = server.complete(prompt, max_tokens=len(ids) + 4, **fields)
            choices = choices_of(answer.events) if stream else answer.json["choices"]
            sent = "".join(choice["text"] for choice in choices)
            names = [name for choice in choices for name in choice["logprobs"]["tokens"]]
            places = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
            assert "".join(names) == sent
            assert all(sent[at : at + len(name)] == name for at, name in zip(places, names, strict=True))
            if start is None:
                assert sent.startswith(server.post("/detokenize", {"tokens": ids}).json["prompt"])
            else:
                assert sent.startswith(start + " th" if start[0] == "t" else start)
    fields = {"logprobs": True, "max_tokens": 4, "temperature": 0, "stream": stream}
    answer = server.chat("hello th", **fields)
    choices = choices_of(answer.events) if stream else answer.json["choices"]
    content = "".join((own.get("delta") or own.get("message") or {}).get("content") or "" for own in choices)
    entries = [entry for own in choices for entry in (own["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == content == " hell"
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content


def test_a_prompt_alone_may_be_echoed(demo: Server) -> None:
    one = demo.complete(PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0).json["choices"][0]
    none = demo.complete(PROMPT, echo=True, logprobs=1, max_tokens=0, temperature=0).json["choices"][0]
    assert none["text"] == PROMPT
    for name, values in none["logprobs"].items():
        assert len(values) == len(one["logprobs"][name]) - 1
    assert none["logprobs"]["token_logprobs"][1:] == pytest.approx(one["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
    assert demo.complete(PROMPT, max_tokens=0).status == 400
    choices = demo.complete([PROMPT, "class A"], n=2, echo=True, max_tokens=1).json["choices"]
    for choice, prompt in zip(choices, [PROMPT, PROMPT, "class A", "class A"], strict=True):
        assert choice["text"].startswith(prompt)


# ---- several completions


def test_the_best_of_several(demo: Server, demo_llm: LLM) -> None:
    fields = {"n": 2, "best_of": 4, "max_tokens": 6, "temperature": 1.2, "seed": 5}
    params = replace(demo_llm.get_default_sampling_params(), **fields)
    outputs = demo_llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    answer = demo.complete(PROMPT, **fields).json
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    refused = demo.complete(PROMPT, n=2, best_of=4, stream=True)
    assert (refused.status, refused.error["param"]) == (400, "best_of")
    assert demo.complete(PROMPT, n=2, best_of=1).status == 400
    assert demo.complete(PROMPT, n=None, best_of=1, max_tokens=2, stream=True).status == 200


# ---- usage


def test_usage_says_what_was_cached(make_server: MakeServer) -> None:
    server = make_server()
    first, second = (server.complete("abcdefghij", max_tokens=4).json["usage"] for _ in range(2))
    assert first == usage(10, 4)
    assert second == usage(10, 4, num_cached=8)
    assert server.complete("abcdefghij", max_tokens=4, cache_salt="own").json["usage"] == usage(10, 4)
    two = server.complete(["abcdefghij"] * 2, max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert two.events[-1]["usage"] == usage(20, 8, num_cached=16)
    server.chat("abcdefghijkl", max_tokens=4)
    turn = server.chat("abcdefghijkl", "well", "and?", max_tokens=4).json["usage"]
    assert turn["prompt_tokens_details"]["cached_tokens"] >= 16
