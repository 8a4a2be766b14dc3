"""Chunks of a stream, put together, are the whole answer: of completions and chats, whatever is asked for, wherever it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoengine.serve.server.http.bounded_http import BoundedHTTP
from tests.drawn import FAST
from tests.serve.server.events import choices_of, reasons_of, text_of
from tests.serve.server.running import Server

HARD = "naïve 🦜🏽 语言 ✂️ e\u0301 👩‍👩‍👧 \U0001f1e6\U0001f1f9 end"
"""Characters of one to four bytes, and so of as many tokens of the toy."""

PROMPT = "def binary_search(items, wanted):\n"
Fields = dict[str, Any]


def near(value: Any) -> Any:
    """Log probabilities, from two computations of the same, are as good as equal; all else is equal."""
    if isinstance(value, dict) and "token" in value:  # of a chat
        return {name: near(other) for name, other in value.items()}
    return pytest.approx(value, abs=1e-3) if isinstance(value, float | dict) else value


def ask(server: Server, is_chat: bool, prompt: str, fields: Fields, **more: Any) -> Any:
    if is_chat:
        if "logprobs" in fields:
            fields = fields | {"logprobs": True, "top_logprobs": fields["logprobs"]}
        return server.chat(prompt, **fields, **more)
    return server.complete(prompt, **fields, **more)


def check_both(server: Server, is_chat: bool, prompt: str, fields: Fields) -> tuple[Fields, list[Fields]]:
    """The choices of a whole answer, and the chunks of the same."""
    whole = ask(server, is_chat, prompt, fields).json
    *events, last = ask(server, is_chat, prompt, fields, stream=True, stream_options={"include_usage": True}).events
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert {choice["index"] for event in events for choice in event["choices"]} == set(range(len(whole["choices"])))
    for choice in whole["choices"]:
        index, pieces = choice["index"], choices_of(events, choice["index"])
        if is_chat:
            first = pieces.pop(0)
            assert first["delta"] == {"role": choice["message"]["role"], "content": ""}
            assert not any("role" in piece["delta"] for piece in pieces)
        assert text_of(events, index) == (choice["message"]["content"] if is_chat else choice["text"])
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]
        if choice["token_ids"] is not None:
            sizes = [len(piece.get("token_ids") or ()) for piece in pieces]
            assert [token for piece in pieces for token in piece.get("token_ids") or ()] == choice["token_ids"]
            if not fields.get("stop") and not fields.get("echo"):
                assert sizes[0] == 1
                assert all(size >= fields.get("stream_interval", 1) for size in sizes[1:-1])
            if not is_chat:
                assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if choice["logprobs"] is None:
            assert not any(piece["logprobs"] for piece in pieces)
        for name, values in (choice["logprobs"] or {}).items():
            found = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name] or ()]
            assert found == [near(value) for value in values or ()]
    return whole, events


STOPS = ["语", ["e\u0301", "🦜"], "end", ["zebra"], ["naïve", "n"], " ", ["语言 ✂️", "语言 ✂x"]]


@settings(FAST, max_examples=60)
@given(
    is_chat=st.booleans(),
    max_tokens=st.integers(1, 12) | st.integers(1, 120),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "stop": st.sampled_from(STOPS),
            "n": st.integers(1, 3),
            "stream_interval": st.sampled_from([2, 5, 1000]),
            "return_token_ids": st.just(True),
            "logprobs": st.just(0),
        },
    ),
)
@example(is_chat=False, max_tokens=60, fields={"stream_interval": 5, "return_token_ids": True})
def test_what_a_parrot_says_is_its_prompt_cut_anywhere(
    parrot: Server, is_chat: bool, max_tokens: int, fields: Fields
) -> None:
    whole, events = check_both(parrot, is_chat, HARD, fields | {"max_tokens": max_tokens})
    prompt = f"<|im_start|>user\n{HARD}<|im_end|>\n<|im_start|>assistant\n" if is_chat else HARD
    said = parrot.serving.tokenizer.encode(prompt)
    text = parrot.serving.tokenizer.decode(said[:max_tokens])
    stops = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop", [])
    stop = min((stop for stop in stops if stop in text), key=lambda own: text.find(own) + len(own), default=None)
    reason = "length" if stop is None and max_tokens <= len(said) else "stop"
    assert whole["usage"]["prompt_tokens"] == len(said)
    for choice in whole["choices"]:
        found = choice["message"]["content"] if is_chat else choice["text"]
        assert found == (text if stop is None else text[: text.find(stop)])
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
        pieces = choices_of(events, choice["index"])[is_chat:]
        texts = [piece["delta"].get("content", "") if is_chat else piece["text"] for piece in pieces]
        assert not any("\ufffd" in piece for piece in texts[:-1])
        if not {"stream_interval", "stop"} & fields.keys():
            assert len(pieces) == min(max_tokens, len(said) + 1), "one chunk for each token"


SAMPLING: dict[str, Any] = {
    "n": st.integers(1, 3),
    "stop": st.sampled_from([[" i", "x"], ["e", "\n"]]),
    "stop_token_ids": st.just([10, 20, 30, 40, 50]),
    "stream_interval": st.sampled_from([3, 4]),
    "logprobs": st.integers(0, 3),
    "return_token_ids": st.just(True),
    "return_tokens_as_token_ids": st.just(True),
    "min_tokens": st.just(5),
    "temperature": st.sampled_from([1.3, 0.6]),
    "top_p": st.sampled_from([0.9, 0.7]),
    "top_k": st.sampled_from([40, 5]),
    "min_p": st.just(0.01),
    "presence_penalty": st.just(1),
    "frequency_penalty": st.just(-1),
    "repetition_penalty": st.just(1.2),
    "logit_bias": st.just({"5": 3}),
    "allowed_token_ids": st.just(list(range(300))),
    "truncate_prompt_tokens": st.just(3),
    "truncation_side": st.just("right"),
    "ignore_eos": st.just(True),
    "cache_salt": st.just("own"),
}


@settings(FAST, max_examples=30)
@given(
    is_chat=st.booleans(),
    fields=st.sets(st.sampled_from(sorted(SAMPLING)), max_size=5).flatmap(
        lambda names: st.fixed_dictionaries({name: SAMPLING[name] for name in sorted(names)})
    ),
    echo=st.sampled_from([None, 10, 0]),
)
@example(is_chat=False, fields={"n": 2, "logprobs": 1}, echo=10)
@example(is_chat=False, fields={"logprobs": 1, "return_token_ids": True}, echo=0)
@example(is_chat=True, fields={"n": 2, "logprobs": 2, "return_token_ids": True}, echo=None)
def test_every_option_is_the_same_in_chunks(demo: Server, is_chat: bool, fields: Fields, echo: int | None) -> None:
    """An echoed prompt may have no completion at all."""
    own: Fields = {"max_tokens": 10, "temperature": 0.7, "seed": 11}
    if echo is not None and not is_chat:
        own |= {"max_tokens": echo, "echo": True}
        fields = {name: value for name, value in fields.items() if name != "min_tokens"}
    if "truncate_prompt_tokens" not in fields:
        fields.pop("truncation_side", None)
    check_both(demo, is_chat, PROMPT, own | fields)


@pytest.mark.parametrize("is_chat", [False, True])
def test_usage_comes_with_every_chunk_or_with_none_unless_it_is_asked_for(parrot: Server, is_chat: bool) -> None:
    def events(**options: Any) -> list[Fields]:
        found: list[Fields] = ask(parrot, is_chat, "abc", {"max_tokens": 3, "n": 2}, stream=True, **options).events
        return found

    *chunks, last = events(stream_options={"include_usage": True, "continuous_usage_stats": True})
    for index in (0, 1):
        own = [event["usage"] for event in chunks if event["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in own] == [*([0] * is_chat), 1, 2, 3]
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in own)
    assert last["usage"]["completion_tokens"] == 6
    for options in ({}, {"stream_options": None}, *({"stream_options": own} for own in ({}, {"include_usage": None}))):
        chunks = events(**options)
        assert not any("usage" in event for event in chunks)
        assert reasons_of(chunks) == ["length"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_text_that_looks_like_a_stream_stays_text(parrot: Server, is_chat: bool) -> None:
    answer = ask(parrot, is_chat, 'line\nfeed "quoted" \\ 🦜 \u2028 data: [DONE]\n\ndata: {}', {"n": 2}, stream=True)
    for name, value in (("cache-control", "no-cache"), ("x-accel-buffering", "no")):
        assert answer.headers[name] == value, "no proxy holds it back"
    for name in ("id", "created", "model"):
        assert len({event[name] for event in answer.events}) == 1


def test_most_of_a_stream_is_written_without_waking_its_task(demo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with log probabilities, which take more to write, nothing is. The client is charged for what it takes."""
    num_written, write_now = 0, BoundedHTTP.write_now
    charges: list[float] = []
    monkeypatch.setattr(demo.serving.work_share, "worked", lambda: float(num_written))
    monkeypatch.setattr(demo.serving.work_share, "charge", lambda _, seconds: charges.append(seconds))

    def counted(own: BoundedHTTP, body: bytes) -> bool:
        nonlocal num_written
        is_written = write_now(own, body)
        num_written += is_written
        return is_written

    monkeypatch.setattr(BoundedHTTP, "write_now", counted)
    fields: Fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    whole = demo.complete(PROMPT, **fields).json["choices"][0]["text"]
    assert text_of(demo.complete(PROMPT, **fields, stream=True).events, 0) == whole
    assert sum(charges) == num_written > 20
    num_written = 0
    assert text_of(demo.complete(PROMPT, **fields, stream=True, logprobs=1).events, 0) == whole
    assert num_written == 0
