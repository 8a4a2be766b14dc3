"""The server's own work is shared: who has used a second leaves as much to each other client before it is heard again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from nanoengine.serve.server.admission.work_share import (
    MOST_OF_STEPS,
    MOST_OTHERS,
    MOST_OWED,
    RECENT_SECONDS,
    SECONDS_OF_A_REFUSAL,
    WorkShare,
)

pytestmark = pytest.mark.anyio


class Clock:
    """Time that passes only when somebody sleeps, or is said to work."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def share(self) -> WorkShare:
        return WorkShare(lambda: self.now, lambda: self.worked, self.sleep)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def ask(share: WorkShare, client: str, work: Callable[[], Any], num_bytes: int = 0) -> None:
    """One request."""

    async def answer() -> None:
        work()

    async with share.turn(client, num_bytes):
        await share.measured(client, answer())


@pytest.mark.parametrize("num_others", [0, 1, 2, 9])
async def test_who_has_worked_leaves_as_much_to_each_other(clock: Clock, num_others: int) -> None:
    share = clock.share()

    for number in range(num_others):
        await share.turn(f"other {number}", 0).__aenter__()
    await ask(share, "client", lambda: clock.work(0.25))
    assert clock.now == 0.25
    await ask(share, "client", lambda: None)
    assert clock.now == pytest.approx(0.25 * (1 + min(num_others, MOST_OTHERS)), abs=0.002)


async def test_several_requests_of_one_come_one_after_the_other(clock: Clock) -> None:
    """What the first takes is not known when the second comes: the least is charged."""
    share = clock.share()
    begun: list[float] = []

    await share.turn("other", 0).__aenter__()
    for _ in range(3):
        await share.turn("client", 1_000_000).__aenter__()
        begun.append(clock.now)
    assert begun[0] == 0
    assert begun[1] == pytest.approx(2.5e-3)
    assert begun[2] == pytest.approx(5e-3)


async def test_what_was_charged_before_is_not_charged_again(clock: Clock) -> None:
    share = clock.share()

    await share.turn("other", 0).__aenter__()
    for _ in range(10):
        await ask(share, "client", lambda: clock.work(0.016), 8_000_000)
    assert clock.now == pytest.approx(0.016 * 19, abs=0.01), "others are left as much as its own work takes"


async def test_who_comes_at_once_after_a_refusal_is_read_later(clock: Clock) -> None:
    """Beside others, as ever."""
    share = clock.share()

    share.refused("client")
    await ask(share, "client", lambda: None)
    assert clock.now == 0
    await share.turn("other", 0).__aenter__()
    for number in range(1, 4):
        share.refused("client")
        await ask(share, "client", lambda: None)
        assert clock.now == pytest.approx(number * SECONDS_OF_A_REFUSAL, abs=0.005)


@pytest.mark.parametrize("seconds", [0.01, 1.0])
async def test_steps_are_paid_but_not_those_of_which_others_had_their_part(clock: Clock, seconds: float) -> None:
    """Beside one other, a client has half of the time; of a long answer a bounded part counts, since steps are shared anyway."""
    spent = {"client": 0.0}
    share = WorkShare(lambda: clock.now, lambda: clock.worked, clock.sleep, spent)

    for client in ("other", "client"):
        await share.turn(client, 0).__aenter__()  # it stays
    for pause in (0.0, seconds, 0.0):
        start = clock.now = clock.now + 1
        await ask(share, "client", lambda: None)
        spent["client"] += seconds
        clock.now += seconds + pause
        await ask(share, "client", lambda: None)
        waited = clock.now - start - seconds - pause
        expected = 0.0 if pause else max(0.0, 2 * min(seconds, MOST_OF_STEPS) - seconds)
        assert waited == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("part", [0.3, 0.49, 0.9])
async def test_only_who_has_used_more_than_its_part_waits(clock: Clock, seed: int, part: float) -> None:
    """Beside one other client. Steps and the writing of their tokens are used in small pieces, with pauses between."""
    rng, spent = random.Random(seed), {"client": 0.0}
    share = WorkShare(lambda: clock.now, lambda: clock.worked, clock.sleep, spent)

    for client in ("other", "client"):
        await share.turn(client, 0).__aenter__()
    await ask(share, "client", lambda: None)
    for _ in range(5):
        clock.now += 0.01
        for _ in range(20):
            step, work = rng.uniform(0, 2e-3), rng.uniform(0, 2e-3)
            spent["client"] += step
            share.charged("client", clock.work, work)
            clock.now += (step + work) / part - work
        start = clock.now
        await ask(share, "client", lambda: None)
        assert (clock.now - start < 1e-3) == (part < 0.5)


@pytest.mark.parametrize("seed", range(8))
async def test_no_account_only_grows(clock: Clock, seed: int) -> None:
    """Of minutes with streams, whose writing waits for nothing, of lengths that are said, and of refusals; each way."""
    rng, share = random.Random(seed), clock.share()

    for number in range(rng.randrange(1, 5)):
        await share.turn(f"other {number}", 0).__aenter__()
    await share.turn("client", 0).__aenter__()
    for _ in range(300):
        match rng.randrange(3):
            case 0:
                share.charged("client", clock.work, rng.random())
            case 1:
                share.refused("client")
            case _:
                await ask(share, "client", lambda: None, rng.choice((0, 10**7, 10**18)))
        clock.now += rng.random() / 2
    start = clock.now
    await ask(share, "client", lambda: None)
    assert clock.now - start <= MOST_OWED + RECENT_SECONDS
    start = clock.now
    for _ in range(9):
        await ask(share, "client", lambda: clock.work(1.0))
    assert clock.now - start > 9 + 5 * MOST_OWED / 2, "nor is much of it paid before"


async def test_nobody_waits_for_one_that_has_gone(clock: Clock) -> None:
    share = clock.share()

    await ask(share, "other", lambda: None)
    await ask(share, "client", lambda: clock.work(0.01))
    await ask(share, "client", lambda: clock.work(0.5))
    assert clock.now == pytest.approx(0.52, abs=0.002), "the other was there a moment ago"
    clock.now = 2.0
    await ask(share, "client", lambda: None)
    assert clock.now == 2.0
    assert share.num_others("client") == 0 or clock.now - 2.0 <= RECENT_SECONDS
    assert not share._num_requests
    assert not share._lines


async def test_all_of_a_request_is_measured_and_goes_on_as_without(clock: Clock) -> None:
    """Errors, results of what is awaited, and the end of its task reach it."""
    share = clock.share()
    seen: list[str] = []

    async def failing() -> None:
        raise KeyError("gone")

    async def answer() -> None:
        clock.work(0.1)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "there")
        seen.append(await future)
        clock.work(0.2)
        try:
            await asyncio.ensure_future(failing())
        except KeyError:
            seen.append("failed")
        try:
            await asyncio.Event().wait()
        finally:
            clock.work(0.4)
            seen.append("ended")

    async def run() -> None:
        await share.measured("client", answer())

    async with share.turn("other", 0):
        task = asyncio.ensure_future(run())
        while len(seen) < 2:
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        owed = share._ready["client"] - clock.now
        assert owed == pytest.approx(0.7, abs=0.7), "what was paid while it went on is paid"
        assert owed >= 0.4
    assert seen == ["there", "failed", "ended"]
