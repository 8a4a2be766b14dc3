"""/v1/completions: what the engine makes, whole and in chunks alike, whatever the prompts and the options."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from tests.server.events import choices_of, reasons_of, text_of
from tests.server.running import Server

HARD = "naïve 🦜🏽 语言 ✂️ e\u0301 👩‍👩‍👧 \U0001f1e6\U0001f1f9 end"
"""Characters of one to four bytes, and so of as many tokens of the toy."""

PROMPT = "def binary_search(items, wanted):\n"


def usage(num_prompt: int, num_new: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def check_close(found: list[Any], expected: list[Any]) -> None:
    """Texts are equal; log probabilities, from two computations of the same, as good as."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(theirs, float | dict) else theirs)


def both(server: Server, prompt: Any, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole answer, and the chunks of the same, after looking at what must be equal: texts, tokens, log probabilities, ends."""
    whole = server.complete(prompt, **fields).json
    events = server.complete(prompt, **fields, stream=True, stream_options={"include_usage": True}).events
    *events, last = events
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        index = choice["index"]
        pieces = choices_of(events, index)
        assert text_of(events, index) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]
        if choice["token_ids"] is not None:
            assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
            assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if choice["logprobs"] is None:
            assert not any(piece["logprobs"] for piece in pieces)
        else:
            for name, values in choice["logprobs"].items():
                check_close([value for piece in pieces for value in piece["logprobs"][name]], values)
    return whole, events


# ---- one prompt


def test_the_answer_is_that_of_the_engine(demo: Server, demo_llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2, logprobs=2, prompt_logprobs=1)
    output = demo_llm.generate(PROMPT, params, use_tqdm=False)[0]
    fields = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
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


@pytest.mark.parametrize("max_tokens", [*range(1, 12), 30, 64, 100])
def test_a_cut_anywhere_is_the_same_in_chunks(parrot: Server, max_tokens: int) -> None:
    whole, events = both(parrot, HARD, max_tokens=max_tokens)
    [choice] = whole["choices"]
    data = HARD.encode()
    assert choice["text"] == data[:max_tokens].decode(errors="replace")
    assert choice["finish_reason"] == ("length" if max_tokens <= len(data) else "stop")
    assert choice["stop_reason"] is None
    assert len(choices_of(events)) == min(max_tokens, len(data) + 1), "one chunk for each token"
    assert not any("\ufffd" in piece["text"] for piece in choices_of(events)[:-1])


@pytest.mark.parametrize("interval", [2, 5, 1000])
def test_chunks_may_have_more_tokens(parrot: Server, interval: int) -> None:
    _, events = both(parrot, HARD, max_tokens=60, stream_interval=interval, return_token_ids=True)
    sizes = [len(piece["token_ids"]) for piece in choices_of(events)]
    assert sizes[0] == 1
    assert all(size >= interval for size in sizes[1:-1])


@pytest.mark.parametrize(
    "stop", ["语", ["e\u0301", "🦜"], "end", ["zebra"], ["naïve", "n"], " ", ["语言 ✂️", "语言 ✂x"]]
)
def test_stop_strings_are_the_same_in_chunks(parrot: Server, stop: Any) -> None:
    whole, _ = both(parrot, HARD, max_tokens=100, stop=stop)
    [choice] = whole["choices"]
    stops = [stop] if isinstance(stop, str) else stop
    ends = {s: HARD.find(s) for s in stops if s in HARD}
    if ends:
        first = min(ends, key=lambda s: ends[s] + len(s))
        assert (choice["text"], choice["stop_reason"]) == (HARD[: ends[first]], first)
    else:
        assert (choice["text"], choice["stop_reason"]) == (HARD, None)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 2, "logprobs": 0},
        {"logprobs": 3, "return_token_ids": True},
        {"logprobs": 2, "return_tokens_as_token_ids": True},
        {"echo": True},
        {"echo": True, "n": 2, "logprobs": 1},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "return_token_ids": True},
        {"stop": [" i", "x"], "logprobs": 0},
        {"stop_token_ids": [10, 20, 30, 40, 50]},
        {"stream_interval": 3, "n": 2, "logprobs": 1},
        {"min_tokens": 5, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"5": 3}},
        {"bad_words": ["self"], "allowed_token_ids": list(range(300))},
        {"truncate_prompt_tokens": 3, "return_token_ids": True},
        {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True},
        {"ignore_eos": True, "cache_salt": "own"},
    ],
    ids=str,
)
def test_every_option_is_the_same_in_chunks(demo: Server, fields: dict[str, Any]) -> None:
    both(demo, PROMPT, **({"max_tokens": 10, "temperature": 0.7, "seed": 11} | fields))


# ---- prompts


def test_several_prompts_of_both_kinds_have_choices_in_order(parrot: Server) -> None:
    ids = parrot.post("/tokenize", {"prompt": "ids"}).json["tokens"]
    whole, events = both(parrot, ["one", ids, HARD], n=2, max_tokens=3)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = ["one", "one", "ids", "ids", "naï"[:2] + "�", "naï"[:2] + "�"]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"] == usage(6 + len(HARD.encode()), 18, whole["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert {choice["index"] for event in events for choice in event["choices"]} == set(range(6))


@pytest.mark.parametrize("form", ["text", "ids", "list of text", "list of ids"])
def test_a_prompt_may_come_in_any_form(parrot: Server, form: str) -> None:
    ids = parrot.post("/tokenize", {"prompt": "abc"}).json["tokens"]
    prompt = {"text": "abc", "ids": ids, "list of text": ["abc"], "list of ids": [ids]}[form]
    answer = parrot.complete(prompt, max_tokens=3, return_token_ids=True).json
    assert [(c["text"], c["prompt_token_ids"]) for c in answer["choices"]] == [("abc", ids)]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        [[1], []],
        [1, "a"],
        [1, [2]],
        5,
        {"a": 1},
        [None],
        [True],
        [-1],
        [1.5],
        [2**40],
        [[2**31]],
        [100000],
        [["a"]],
        [[[1]]],
        "x" * 1024,
        [1] * 1024,
    ],
    ids=lambda prompt: str(prompt)[:20],
)
def test_a_prompt_that_is_none_is_refused(parrot: Server, prompt: Any) -> None:
    before = parrot.metrics().num_requests
    answer = parrot.complete(prompt, max_tokens=2)
    assert answer.status == 400
    assert answer.error["type"] == "BadRequestError"
    assert answer.error["param"] == "prompt"
    assert parrot.metrics().num_requests == before, "nothing of it runs"


def test_max_tokens_is_16_unless_it_is_said(parrot: Server) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert parrot.complete("a" * 40, **fields).json["usage"]["completion_tokens"] == 16


def test_a_completion_ends_where_the_longest_sequence_does(parrot: Server) -> None:
    whole, _ = both(parrot, "a" * 1000, max_tokens=900, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["choices"][0]["finish_reason"] == "length"
    refused = parrot.complete("a", max_tokens=1025)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")


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


def test_a_prompt_alone_may_be_echoed(demo: Server) -> None:
    one = demo.complete(PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0).json["choices"][0]
    none = demo.complete(PROMPT, echo=True, logprobs=1, max_tokens=0, temperature=0).json["choices"][0]
    assert none["text"] == PROMPT
    for name, values in none["logprobs"].items():
        assert len(values) == len(one["logprobs"][name]) - 1
    assert none["logprobs"]["token_logprobs"][1:] == pytest.approx(one["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
    assert demo.complete(PROMPT, max_tokens=0).status == 400


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_so_many_likeliest_tokens_and_the_chosen_one(demo: Server, logprobs: int) -> None:
    answer = demo.complete(PROMPT, max_tokens=8, temperature=1.5, seed=1, logprobs=logprobs, return_token_ids=True)
    [choice] = answer.json["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert logprobs <= len(top) <= logprobs + 1
        assert all(-9999 <= value <= 0 for value in top.values())


def test_tokens_may_be_named_by_their_ids(demo: Server) -> None:
    answer = demo.complete(PROMPT, max_tokens=4, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    [choice] = answer.json["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


# ---- several completions


def test_the_best_of_several(demo: Server, demo_llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=4, max_tokens=6, temperature=1.2, seed=5)
    outputs = demo_llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    answer = demo.complete(PROMPT, n=2, best_of=4, max_tokens=6, temperature=1.2, seed=5).json
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    refused = demo.complete(PROMPT, n=2, best_of=4, stream=True)
    assert (refused.status, refused.error["param"]) == (400, "best_of")
    assert demo.complete(PROMPT, n=2, best_of=1).status == 400
    assert demo.complete(PROMPT, n=None, best_of=1, max_tokens=2, stream=True).status == 200


def test_choices_of_one_prompt_differ_and_a_seed_repeats_them(demo: Server) -> None:
    first, second = (demo.complete(PROMPT, n=4, max_tokens=8, temperature=1.5, seed=2).json for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in second["choices"]]


# ---- usage


def test_usage_says_what_was_cached(make_server: Any) -> None:
    server = make_server()
    first, second = (server.complete("abcdefghij", max_tokens=4).json["usage"] for _ in range(2))
    assert first == usage(10, 4)
    assert second == usage(10, 4, num_cached=8)
    assert server.complete("abcdefghij", max_tokens=4, cache_salt="own").json["usage"] == usage(10, 4)


def test_usage_may_come_with_every_chunk(parrot: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = parrot.complete("abc", max_tokens=3, stream=True, stream_options=options).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert [event["usage"]["total_tokens"] for event in events] == [4, 5, 6, 6]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}], ids=str)
def test_usage_is_left_out_unless_it_is_asked_for(parrot: Server, options: Any) -> None:
    events = parrot.complete("abc", max_tokens=3, stream=True, stream_options=options).events
    assert not any("usage" in event for event in events)
    assert reasons_of(events) == ["length"]


def test_prompt_log_probabilities_are_not_dropped_in_a_stream(demo: Server) -> None:
    for answer in (
        demo.complete(PROMPT, prompt_logprobs=1, stream=True),
        demo.complete(PROMPT, prompt_logprobs=1, stream=True, echo=True),
        demo.chat("Hello", prompt_logprobs=1, stream=True),
    ):
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
