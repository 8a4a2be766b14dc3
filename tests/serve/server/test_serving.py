"""Who is let in: limits, a full queue, a server that ends, an engine that has died."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from nanoengine.serve.server.bodies.prompts import CHARS_OF_A_STEP
from tests.serve.server.conftest import LIMITS, Held, MakeServer
from tests.serve.server.running import Answer, Server, in_thread, post_bytes, until

# ---- limits


def test_limits_are_allowed_themselves_and_named_to_who_passes_them(parrot: Server) -> None:
    fields = {"n": LIMITS["max_n"], "stop": ["x"] * LIMITS["max_stop_strings"], "max_tokens": 1}
    answer = parrot.complete(["a"] * LIMITS["max_prompts"], **fields)
    assert len(answer.json["choices"]) == LIMITS["max_n"] * LIMITS["max_prompts"]
    more = {"max_n": {"best_of": 5}, "max_stop_strings": {"stop": ["x"] * 5}, "max_prompts": {"prompt": ["a"] * 9}}
    for knob, fields in more.items():
        assert knob in parrot.post("/v1/completions", {"prompt": "a"} | fields).error["message"]


# ---- the queue


def test_who_finds_the_queue_full_is_told_to_come_back(make_server: MakeServer) -> None:
    """Every completion counts as waiting."""
    server = make_server({"max_num_seqs": 1}, max_waiting=3)
    server.gate.shut()
    later = [server.later(server.complete, "abc", max_tokens=3)]
    server.gate.let()
    until(lambda: server.serving.engine.num_waiting == 0)
    later.append(server.later(server.complete, "abc", max_tokens=3))
    assert server.complete("a", n=3).status == 503
    later.append(server.later(server.complete, "abc", n=2, max_tokens=3))
    for ask in (server.complete, server.chat):
        for stream in (False, True):
            answer = ask("a", stream=stream)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error["type"] == "ServiceUnavailableError"
            assert "max_waiting" in answer.error["message"]
    assert server.serving.admission.num_rejected.total() == 5
    assert server.get("/health").status == 200, "it is busy, not ill"
    server.gate.open()
    assert [answer.result().status for answer in later] == [200] * 3
    assert server.complete("abc", max_tokens=3).status == 200
    server.check_idle()


def test_who_finds_nobody_waiting_is_let_in(make_server: MakeServer) -> None:
    server = make_server({"max_num_seqs": 2}, max_waiting=0)
    assert server.complete("abc", max_tokens=3).json["choices"][0]["text"] == "abc"


def test_what_no_queue_could_hold_is_refused_for_good(make_server: MakeServer) -> None:
    server = make_server(max_waiting=14)
    refused = server.complete(["abc"] * 5, n=3, max_tokens=3)
    assert refused.status == 400
    assert "15 sequences" in refused.error["message"]
    answer = server.complete(["abc"] * 7, n=2, max_tokens=3)
    assert [choice["text"] for choice in answer.json["choices"]] == ["abc"] * 14


def test_who_has_little_in_a_full_queue_is_let_in(make_server: MakeServer) -> None:
    """An eighth of the queue is for each client, also of what the engine, which is in a step, has not heard of."""
    server = make_server({"max_num_seqs": 1}, max_waiting=16, api_key=("a", "b"))
    server.gate.shut()

    def post(key: str, count: int = 1) -> Answer:
        body = {"prompt": ["abc"] * count, "max_tokens": 2}
        return server.post("/v1/completions", body, {"authorization": f"Bearer {key}"})

    later: list[Future[Answer]] = []
    for key, count in (("a", 16), ("b", 1), ("b", 1)):
        later.append(server.later(post, key, count))
        assert post("a").status == 503
    assert post("b").status == 503
    server.gate.open()
    assert [answer.result().status for answer in later] == [200] * 3
    assert post("a").status == 200
    server.check_idle()


def test_the_tokens_that_wait_have_a_limit_of_which_others_have_their_part(make_server: MakeServer) -> None:
    """A request counts for its prompts and what it may get."""
    server = make_server({"max_num_seqs": 1}, max_waiting_tokens=800, api_key=("a", "b"))

    def ask(key: str, *prompts: str, **fields: Any) -> Answer:
        return server.post("/v1/completions", {"prompt": [*prompts], **fields}, {"authorization": f"Bearer {key}"})

    def waiting() -> Any:
        return server.serving.admission.tokens.of_clients

    server.gate.shut()
    never = ask("a", "a" * 300, "b" * 300, max_tokens=101)
    assert never.status == 400
    assert "may take 802 tokens" in never.error["message"]
    assert "a client may have 800 tokens (max_waiting_tokens)" in never.error["message"]
    later = [server.later(ask, "a", "x" * 10, max_tokens=5)]
    server.gate.let()
    until(lambda: server.serving.engine.num_waiting == 0)
    later.append(server.later(ask, "a", "abc", max_tokens=97, n=2))
    until(lambda: waiting() == {"key-0": 200})
    later.append(server.later(ask, "a", "a" * 300, max_tokens=200))
    until(lambda: waiting() == {"key-0": 700})
    refused = ask("a", "abc", max_tokens=98)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    for said in ("may take 101 tokens", "700 tokens of 800 tokens (max_waiting_tokens) are taken, 700 tokens by you"):
        assert said in refused.error["message"]
    assert ask("b", "abc", max_tokens=98).status == 503, "it is more than an eighth of all"
    later.append(server.later(ask, "b", "abc", max_tokens=97))
    until(lambda: waiting() == {"key-0": 700, "key-1": 100})
    assert server.serving.admission.num_rejected == {"max_num_queued_tokens": 2}
    until(lambda: server.gate.let() or waiting() == {"key-0": 600, "key-1": 100})  # one of two completions has begun
    server.gate.open()
    assert [answer.result().status for answer in later] == [200] * 4
    server.check_idle()


def test_what_was_refused_leaves_nothing_behind(make_server: MakeServer) -> None:
    server = make_server(max_waiting=1)
    for prompt in ("", "x" * 5000, [10**6]):
        for _ in range(5):
            assert server.complete(prompt).status == 400
    server.gate.shut()
    later = server.later(server.complete, "abc", max_tokens=3)
    server.gate.open()
    assert later.result().status == 200


# ---- the end of the engine


def test_an_engine_that_dies_is_told_to_all_and_keeps_nobody_waiting(make_server: MakeServer) -> None:
    server = make_server()
    server.gate.shut()
    ways: list[dict[str, Any]] = [{"stream": False}, {"stream": True}, {"stream": True, "n": 2}]
    later = [server.later(server.complete, "abcdef", max_tokens=6, **fields) for fields in ways]
    server.gate.let(2)
    until(lambda: server.gate.num_steps == 2)
    server.gate.error = SystemError("the machine is on fire")
    server.gate.open()
    whole, *streams = [answer.result() for answer in later]
    assert whole.status == 503
    assert "on fire" in whole.error["message"]
    for stream in streams:
        assert "on fire" in stream.events[-1]["error"]["message"]
        assert stream.events[-1]["error"]["code"] == 503
    until(lambda: not len(server.serving.jobs))

    health = server.get("/health")
    assert health.status == 503
    assert "on fire" in health.json["status"]
    answers = [server.complete("a"), server.complete("a", stream=True), server.chat("a")]
    answers += [server.post("/reset_prefix_cache", b""), server.get("/metrics"), server.get("/view")]
    for answer in answers:
        assert answer.status == 503, answer.body
        assert "on fire" in answer.error["message"]
    assert server.get("/v1/models").status == 200
    assert server.post("/tokenize", {"prompt": "a"}).json["count"] == 1
    assert server.post("/abort_requests", {"request_ids": ["cmpl-x"]}).json["aborted"] == 0


def test_a_step_that_hangs_is_told_until_it_ends(make_server: MakeServer) -> None:
    """As on a device that answers no more: whoever watches over the server hears of it."""
    server = make_server(max_step_seconds=0.05)
    server.gate.shut()
    held = server.later(server.complete, "abc", max_tokens=3)
    server.gate.wait_until_held()
    until(lambda: server.get("/health").status == 503)
    assert "max_step_seconds" in server.get("/health").json["status"]
    refused = server.complete("a")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    server.gate.open()
    assert held.result().json["choices"][0]["text"] == "abc"
    until(lambda: server.get("/health").status == 200)


# ---- text


def test_a_long_prompt_holds_nobody_up(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is worked on beside the event loop: while all of its threads are busy, what needs none is answered."""
    server = make_server(text_threads=1)
    held = Held(monkeypatch, server.serving.tokenizer, "encode")
    later = in_thread(server.complete, "slow"), in_thread(server.post, "/tokenize", {"prompt": "slow"})
    held.wait()
    for path in ("/health", "/metrics", "/view", "/v1/models"):
        assert server.get(path).status == 200
    held.let_go()
    assert [answer.result().status for answer in later] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "gone"}),
        ("/v1/completions", {"prompt": "gone", "max_tokens": 1}),
        ("/v1/embeddings", {"input": "gone"}),
        ("/v1/completions", {"prompt": [66], "max_tokens": 1, "structured_outputs": {"regex": "a"}}),
    ],
)
def test_who_hangs_up_leaves_the_line_for_text_and_for_grammars(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    server = make_server(text_threads=1)
    has_grammar = "structured_outputs" in body
    owner, name = (server.serving.engine, "make_request") if has_grammar else (server.serving.tokenizer, "encode")
    held = Held(monkeypatch, owner, name)
    if has_grammar:
        turns, asked, first = server.serving.grammar_threads, (path, body | {"prompt": [65]}), [65]
    else:
        turns, asked, first = server.serving.text._pools[False], ("/tokenize", {"prompt": "first"}), "first"
    later = in_thread(server.post, *asked)
    held.wait()
    gone = server.connect(post_bytes(path, body))
    until(lambda: turns._num_functions.total() == 2)
    gone.close()
    until(lambda: turns._num_functions.total() == 1)
    held.let_go()
    assert later.result().status == 200
    assert held.asked == [first]
    assert server.post("/tokenize", {"prompt": "last"}).status == 200


SAID = [{"role": "user", "content": "a"}]
TOO_MANY = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(1025)]
TOOL = {"type": "function", "name": "f", "function": {"name": "f", "parameters": {"enum": ["abcdefgh"] * 1000}}}
LONG = [{"role": "user", "content": [{"type": "text", "text": "a" * 5000}] * 2}]


TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": TOO_MANY}, "messages"),
    ("/v1/messages", {"messages": TOO_MANY, "max_tokens": 1}, "messages"),
    ("/v1/responses", {"input": TOO_MANY}, "input"),
    ("/api/chat", {"model": "parrot", "messages": TOO_MANY}, "messages"),
    ("/v1/messages/count_tokens", {"messages": TOO_MANY}, "messages"),
    ("/tokenize", {"messages": TOO_MANY}, "messages"),
    ("/tokenize", {"prompt": "a" * 9001}, "prompt"),
    ("/v1/chat/completions", {"messages": LONG}, "messages"),
    ("/v1/chat/completions", {"messages": SAID * 200}, "messages"),  # each counts for the work that it is
    ("/v1/messages", {"messages": SAID, "max_tokens": 1, "system": LONG[0]["content"]}, "system"),
    ("/v1/chat/completions", {"messages": SAID, "tools": [TOOL]}, "tools"),
    ("/v1/responses", {"input": SAID, "tools": [TOOL]}, "tools"),
    ("/api/chat", {"model": "parrot", "messages": SAID, "format": TOOL}, "format"),
    ("/v1/completions", {"prompt": "a", "json_schema": TOOL}, "json_schema"),
    ("/tokenize", {"messages": SAID, "chat_template_kwargs": TOOL}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": SAID, "documents": [{"text": "a"}] * 200}, "documents"),
]


def test_what_is_too_much_is_refused_before_it_is_rendered(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(max_text_chars=9000)
    monkeypatch.setattr(server.serving.prompts.chats, "prompt", None)
    monkeypatch.setattr(server.serving.engine, "make_request", None)
    for path, body, field in TOO_MUCH:
        refused = server.post(path, body)
        assert refused.status == 400
        begins = b'"message":"' + field.encode(), b'"error":"' + field.encode()
        assert any(begin in refused.body for begin in begins), refused.body
        assert (b"max_model_len" if TOO_MANY in body.values() else b"max_text_chars") in refused.body
        assert len(refused.body) < 500


def test_prompts_of_one_call_leave_others_their_turn(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list of texts is encoded a few at a time."""
    server = make_server({"max_model_len": 1 << 17, "num_blocks": 1 << 16})
    steps: list[int] = []
    run = server.serving.text.run

    def counted(function: Any, *args: Any) -> Any:
        steps.append(1)
        return run(function, *args)

    monkeypatch.setattr(server.serving.text, "run", counted)
    answer = server.complete(["a" * (CHARS_OF_A_STEP // 2)] * 6, max_tokens=1, truncate_prompt_tokens=1)
    assert answer.status == 200
    assert len(steps) == 1 + 3, "the body is read, and three times two of them are encoded"
