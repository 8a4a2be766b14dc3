"""Who is let in: limits, a full queue, a server that ends, an engine that has died."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest

from tests.aio.toys import PATIENCE
from tests.server.conftest import LIMITS, MakeServer
from tests.server.events import reasons_of, text_of
from tests.server.running import Answer, Server, until


def start(server: Server, count: int, **fields: Any) -> tuple[list[Thread], list[Answer]]:
    """So many completions that are being made."""
    answers: list[Answer] = []
    threads = [Thread(target=lambda: answers.append(server.complete("abcdef", **fields))) for _ in range(count)]
    before = len(server.serving.jobs)
    for thread in threads:
        thread.start()
    until(lambda: len(server.serving.jobs) == before + count)
    return threads, answers


# ---- limits


@pytest.mark.parametrize(
    ("fields", "param", "knob"),
    [
        ({"n": LIMITS["max_n"] + 1}, "n", "max_n"),
        ({"best_of": LIMITS["max_n"] + 1}, "n", "max_n"),
        ({"stop": ["x"] * (LIMITS["max_stop_strings"] + 1)}, "stop", "max_stop_strings"),
        ({"prompt": ["a"] * (LIMITS["max_prompts"] + 1)}, "prompt", "max_prompts"),
        ({"prompt": [[1]] * (LIMITS["max_prompts"] + 1)}, "prompt", "max_prompts"),
    ],
    ids=str,
)
def test_what_one_call_may_ask_for_has_limits(parrot: Server, fields: dict[str, Any], param: str, knob: str) -> None:
    answer = parrot.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert knob in answer.error["message"]


def test_the_limits_themselves_are_allowed(parrot: Server) -> None:
    fields = {"n": LIMITS["max_n"], "stop": ["x"] * LIMITS["max_stop_strings"], "max_tokens": 1}
    answer = parrot.complete(["a"] * LIMITS["max_prompts"], **fields)
    assert len(answer.json["choices"]) == LIMITS["max_n"] * LIMITS["max_prompts"]


# ---- the queue


@pytest.mark.parametrize("stream", [False, True])
def test_who_finds_the_queue_full_is_told_to_come_back(make_server: MakeServer, stream: bool) -> None:
    server = make_server({"max_num_seqs": 1}, max_waiting=3)
    server.gate.shut()
    running, answers = start(server, 1, max_tokens=3)
    server.gate.let()
    until(lambda: server.serving.engine.num_waiting == 0)
    waiting, waited = start(server, 3, max_tokens=3)
    for answer in (server.complete("a", stream=stream), server.chat("a", stream=stream)):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["type"] == "ServiceUnavailableError"
        assert "max_waiting" in answer.error["message"]
    assert server.serving.num_rejected.total() == 2
    assert server.get("/health").status == 200, "it is busy, not ill"
    server.gate.open()
    for thread in (*running, *waiting):
        thread.join()
    assert all(answer.status == 200 for answer in (*answers, *waited))
    assert server.complete("abc", max_tokens=3).status == 200
    server.check_idle()


def test_every_completion_counts_as_waiting(make_server: MakeServer) -> None:
    server = make_server({"max_num_seqs": 1}, max_waiting=4)
    server.gate.shut()
    threads, _ = start(server, 1, max_tokens=3)
    assert server.complete(["a", "b"], n=2).status == 503
    more, _ = start(server, 1, n=3, max_tokens=3)
    assert server.complete("a").status == 503
    server.gate.open()
    for thread in (*threads, *more):
        thread.join()


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
    answers: list[Answer] = []
    threads: list[Thread] = []

    def post(key: str, count: int) -> Answer:
        body = {"prompt": ["abc"] * count, "max_tokens": 2}
        return server.post("/v1/completions", body, {"authorization": f"Bearer {key}"})

    for num_jobs, (key, count) in enumerate((("a", 16), ("b", 1), ("b", 1)), start=1):
        threads.append(Thread(target=lambda key=key, count=count: answers.append(post(key, count))))
        threads[-1].start()
        until(lambda num_jobs=num_jobs: len(server.serving.jobs) == num_jobs)
        assert post("a", 1).status == 503
    assert post("b", 1).status == 503
    server.gate.open()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 3
    assert post("a", 1).status == 200
    server.check_idle()


def test_what_was_refused_leaves_nothing_behind(make_server: MakeServer) -> None:
    server = make_server(max_waiting=1)
    for prompt in ("", "x" * 5000, [10**6]):
        for _ in range(5):
            assert server.complete(prompt).status == 400
    server.gate.shut()
    threads, answers = start(server, 1, max_tokens=3)
    server.gate.open()
    threads[0].join()
    assert answers[0].status == 200


# ---- the end of the server


def test_a_server_that_ends_takes_no_more_and_finishes_what_runs(make_server: MakeServer) -> None:
    server = make_server()
    server.gate.shut()
    whole, wholes = start(server, 1, max_tokens=6)
    streams, streamed = start(server, 1, max_tokens=6, stream=True)
    server.serving.is_draining = True
    for answer in (server.complete("a"), server.chat("a", stream=True)):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "shutting down" in answer.error["message"]
    health = server.get("/health")
    assert (health.status, health.json) == (503, {"status": "the server is shutting down"})
    server.gate.open()
    for thread in (*whole, *streams):
        thread.join()
    assert wholes[0].json["choices"][0]["text"] == "abcdef"
    assert (text_of(streamed[0].events), reasons_of(streamed[0].events)) == ("abcdef", ["length"])


# ---- the end of the engine


@pytest.fixture
def dead(make_server: MakeServer) -> tuple[Server, list[Answer]]:
    """A server whose engine has died while it worked for three, and what they were told."""
    server = make_server()
    server.gate.shut()
    threads, answers = start(server, 1, max_tokens=6)
    more, others = start(server, 1, max_tokens=6, stream=True)
    batch, batches = start(server, 1, max_tokens=6, n=2, stream=True)
    server.gate.let(2)
    until(lambda: server.gate.num_steps == 2)
    server.gate.error = SystemError("the machine is on fire")
    server.gate.open()
    for thread in (*threads, *more, *batch):
        thread.join()
    return server, [*answers, *others, *batches]


def test_an_engine_that_dies_is_told_to_all(dead: tuple[Server, list[Answer]]) -> None:
    server, (whole, *streams) = dead
    assert whole.status == 503
    assert "on fire" in whole.error["message"]
    for stream in streams:
        assert "on fire" in stream.events[-1]["error"]["message"]
        assert stream.events[-1]["error"]["code"] == 503
    until(lambda: not len(server.serving.jobs))


def test_a_dead_engine_keeps_nobody_waiting(dead: tuple[Server, list[Answer]]) -> None:
    server, _ = dead
    health = server.get("/health")
    assert health.status == 503
    assert "on fire" in health.json["status"]
    answers = [
        server.complete("a"),
        server.complete("a", stream=True),
        server.chat("a"),
        server.post("/reset_prefix_cache", b""),
        server.get("/metrics"),
        server.get("/view"),
    ]
    for answer in answers:
        assert answer.status == 503, answer.body
        assert "on fire" in answer.error["message"]
    assert server.get("/v1/models").status == 200
    assert server.post("/tokenize", {"prompt": "a"}).json["count"] == 1
    assert server.post("/abort_requests", {}).json["aborted"] == 0


# ---- text


def test_a_long_prompt_holds_nobody_up(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is worked on beside the event loop: while all of its threads are busy, what needs none is answered."""
    server = make_server(text_threads=1)
    is_held, may_go_on = Event(), Event()
    encode = server.serving.tokenizer.encode

    def slowly(text: str, **options: Any) -> list[int]:
        is_held.set()
        may_go_on.wait(PATIENCE)
        return encode(text, **options)

    monkeypatch.setattr(server.serving.tokenizer, "encode", slowly)
    threads, answers = [], list[Answer]()
    for call in (lambda: server.complete("slow"), lambda: server.post("/tokenize", {"prompt": "slow"})):
        threads.append(Thread(target=lambda call=call: answers.append(call())))
        threads[-1].start()
    assert is_held.wait(PATIENCE)
    assert server.get("/health").status == 200
    assert server.get("/v1/models").status == 200
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200, 200]
