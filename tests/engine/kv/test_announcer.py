"""KVAnnouncer: a listener hears everything once, and can break nothing."""

from __future__ import annotations

import logging

import pytest

from nanoengine.engine.kv.announcer import KVAnnouncer
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.events import BlockStored, KVEvent
from tests.engine.toys import make_sequence


def publish(manager: BlockManager, seq_id: int, *prompt: int) -> None:
    seq = make_sequence(seq_id, prompt)
    assert manager.admit(seq) is not None
    manager.publish(seq, len(prompt))


def test_a_listener_hears_what_is_there_and_then_what_comes() -> None:
    manager = BlockManager(20, 2)
    announcer, heard = KVAnnouncer(manager), list[KVEvent]()
    publish(manager, 0, 1, 2, 3, 4)
    announcer.attach(heard.append)
    assert [event.token_ids(2) for event in heard if isinstance(event, BlockStored)] == [[1, 2], [3, 4]]
    publish(manager, 1, 5, 6)
    assert len(heard) == 2
    announcer.announce()
    announcer.announce()
    assert [event.token_ids(2) for event in heard[2:] if isinstance(event, BlockStored)] == [[5, 6]]


def test_nothing_is_collected_while_nobody_listens() -> None:
    manager = BlockManager(20, 2)
    announcer, heard = KVAnnouncer(manager), list[KVEvent]()
    announcer.attach(heard.append)
    announcer.attach(None)
    publish(manager, 0, 1, 2)
    announcer.announce()
    assert not manager.collect_events
    assert heard == []


def test_what_a_listener_raises_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = BlockManager(20, 2)
    announcer, heard = KVAnnouncer(manager), list[KVEvent]()

    def listener(event: KVEvent) -> None:
        heard.append(event)
        raise ValueError("no")

    with caplog.at_level(logging.WARNING, "nanoengine"):
        announcer.attach(listener)
        publish(manager, 0, 1, 2, 3, 4)
        announcer.announce()
    assert len(heard) == announcer.num_errors == 2, "the second event was told too"
    assert len(caplog.records) == 1
    manager.check()
