"""FairThreadPool: whatever one client has done, another waits for one piece of it at most."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nanoengine.serve.server.admission.fair_thread_pool import FairThreadPool
from tests.serve.aio.toys import PATIENCE
from tests.serve.server.running import Server, in_thread, until

pytestmark = pytest.mark.anyio


async def test_a_client_has_one_piece_at_a_time_and_all_take_turns() -> None:
    done: list[str] = []
    running: list[str] = []
    gate = threading.Event()

    def work(client: str) -> str:
        assert client not in running
        running.append(client)
        gate.wait(30)
        running.remove(client)
        done.append(client)
        return client

    turns = FairThreadPool(2, 1)
    asked = [asyncio.ensure_future(turns.run(client, lambda own=client: work(own))) for client in "aaaaaabbc"]  # type: ignore[misc]
    while len(running) < 2:
        await asyncio.sleep(0.001)
    assert sorted(running) == ["a", "b"]
    gate.set()
    assert await asyncio.gather(*asked) == list("aaaaaabbc")
    turns.close()
    assert not turns._num_functions
    assert not turns._clients
    assert done.index("c") <= 3, "it waited for no more than one piece of each"


async def test_who_is_cancelled_gives_its_place_back_when_its_thread_is_free() -> None:
    gate = threading.Event()

    turns = FairThreadPool(2, 1)
    asked = [asyncio.ensure_future(turns.run("a", lambda: gate.wait(30))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await turns.run("b", lambda: "done") == "done"
    asked[1].cancel()  # one that waits
    asked[0].cancel()  # one that is worked on: its thread is not free before it has ended
    gate.set()
    assert await asked[2] is True
    with pytest.raises(ValueError, match="wrong"):
        await turns.run("a", _wrong)
    assert await turns.run("a", lambda: "done") == "done"
    turns.close()


def _wrong() -> None:
    raise ValueError("wrong")


def test_grammars_that_are_being_compiled_hold_up_no_other_text(demo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, make = threading.Event(), demo.serving.engine.make_request
    begun: list[bool] = []

    def making(prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        if params.structured_outputs is not None:
            begun.append(True)
            gate.wait(PATIENCE)
        return make(prompt, params, *args, **options)

    monkeypatch.setattr(demo.serving.engine, "make_request", making)
    asked = [in_thread(demo.complete, "a", structured_outputs={"regex": f"[a-z]{{{n}}}"}) for n in range(1, 5)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    calls = [in_thread(demo.chat, "a", tools=[tool], tool_choice="required", max_tokens=40) for _ in range(4)]
    until(lambda: begun)
    assert demo.complete("a", max_tokens=2).status == 200
    assert demo.chat("a", max_tokens=2).status == 200
    assert demo.post("/tokenize", {"prompt": "a"}).status == 200
    assert len(begun) == 1, "one client's are compiled one by one"
    gate.set()
    assert [len(own.result().json["choices"][0]["text"]) for own in asked] == [1, 2, 3, 4]
    assert [own.result().status for own in calls] == [200] * 4
    demo.check_idle()
