"""The soak's bookkeeping: no fault in an answer goes unseen, and a right one is none, in every shape that it may have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench
from benchmarks.http_client import Answer
from benchmarks.load import ServerProcess
from benchmarks.soak import Case, Note, Soak, choices_of, fault, memory_fault

CASE = Case({"prompt": [1]}, "abc", [7, 8, 9], "length")
CHAT = Case({"messages": []}, "abc", [7, 8, 9], "length")


def piece(index: int, text: str, token_ids: list[int], end: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "token_ids": token_ids, "finish_reason": end}


def streamed(*choices: dict[str, Any], is_done: bool = True) -> Answer:
    events = [b"data: " + json.dumps({"choices": [choice]}).encode() for choice in choices]
    events += [b'data: {"choices":[],"usage":{}}', *([b"data: [DONE]"] if is_done else [])]
    return Answer(200, {"content-type": "text/event-stream"}, b"".join(event + b"\n\n" for event in events))


def whole(*choices: dict[str, Any]) -> Answer:
    return Answer(200, {"content-type": "application/json"}, body=json.dumps({"choices": choices}).encode())


def right(index: int) -> list[dict[str, Any]]:
    return [piece(index, "a", [7]), piece(index, "", [8]), piece(index, "bc", [9], "length")]


def test_right_answers_have_no_fault() -> None:
    mixed = [piece for pair in zip(right(0), right(1), strict=True) for piece in pair]
    for n, answer in (
        (1, whole(piece(0, "abc", [7, 8, 9], "length"))),
        (1, streamed(*right(0))),
        (2, streamed(*mixed)),
    ):
        assert fault(CASE, n, answer) is None


def test_chats_are_read_in_both_shapes() -> None:
    message = {"index": 0, "message": {"content": "abc"}, "token_ids": [7, 8, 9], "finish_reason": "length"}
    assert fault(CHAT, 1, whole(message)) is None
    deltas = [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"index": 0, "delta": {"content": "ab"}, "token_ids": [7, 8], "finish_reason": None},
        {"index": 0, "delta": {"content": "c"}, "token_ids": [9], "finish_reason": "length"},
    ]
    assert fault(CHAT, 1, streamed(*deltas)) is None
    assert "".join(choices_of(streamed(*deltas))[0].text) == "abc"


@pytest.mark.parametrize(
    ("kind", "n", "answer"),
    [
        ("failed", 1, Answer(500, error="oh")),
        ("failed", 1, Answer(200, error="the connection ended within the answer")),
        ("lost", 1, streamed(*right(0), is_done=False)),
        ("lost", 2, streamed(*right(0))),
        ("lost", 1, streamed(*right(0), *right(1))),
        ("wrong", 1, streamed(*right(0)[:2])),
        ("wrong", 1, streamed(*right(0), piece(0, "", [], "length"))),
        ("wrong", 1, streamed(*right(0)[:2], piece(0, "bc", [9], "stop"))),
        ("wrong", 1, streamed(*right(0)[:2], piece(0, "", [], "length"))),
        ("wrong", 1, streamed(piece(0, "", [7, 8, 9, 7]), piece(0, "abc", [], "length"))),
        ("wrong", 1, streamed(right(0)[1], right(0)[0], right(0)[2])),
        ("wrong", 1, whole(piece(0, "abd", [7, 8, 9], "length"))),
        ("wrong", 1, whole(piece(0, "abcc", [7, 8, 9], "length"))),
        ("wrong", 1, whole(piece(0, "a", [7], "abort"))),
    ],
)
def test_each_fault_is_seen(kind: str, n: int, answer: Answer) -> None:
    found = fault(CASE, n, answer)
    assert found is not None
    assert found.startswith(f"{kind}: ")


def test_what_was_aborted_is_a_beginning() -> None:
    assert fault(CASE, 1, streamed(piece(0, "a", [7, 8]), piece(0, "", [], "abort")), may_be_aborted=True) is None
    assert fault(CASE, 1, streamed(*right(0)), may_be_aborted=True) is None
    for text, token_ids in (("x", [7]), ("a", [8]), ("abcd", [7])):
        answer = streamed(piece(0, text, token_ids, "abort"))
        assert fault(CASE, 1, answer, may_be_aborted=True) is not None, (text, token_ids)


def notes(*megabytes: int) -> list[Note]:
    return [Note(30.0 * i, size << 20, {}) for i, size in enumerate(megabytes)]


def test_memory_may_grow_at_first_and_not_later() -> None:
    assert memory_fault(notes(100, 150, 200, 200, *[202] * 12)) is None
    assert memory_fault(notes(200, 200, 200, 200, *[200 + i for i in range(12)])) is not None
    assert memory_fault(notes(100, 200, 300)) is None, "a few notes say nothing"
    assert memory_fault(notes(*[200] * 14, 400, 200)) is None, "once is no leak"


def test_faults_are_kept(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    soak = Soak(ServerProcess(process, 1, tmp_path), [CASE], 0)
    soak.count("ask", "right")
    soak.count("ask", "wrong: x")
    assert soak.counts == {"ask right": 1, "ask wrong": 1}
    assert soak.faults == ["ask wrong: x"]


def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["soak", "--minutes", "0.05", "--clients", "4", "--cases", "12"]) == 0
    shown = capsys.readouterr().out
    assert "end idle" in shown
    assert "asks right" in shown
