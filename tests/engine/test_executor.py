"""What an executor says of itself can cross a process border."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from nanoengine.engine.executor import ExecutorInfo
from nanoengine.engine.kv.groups import WINDOW, KVSpec

INFO = ExecutorInfo(
    num_blocks=20,
    groups=(KVSpec(), KVSpec(WINDOW, 8)),
    num_host_blocks=3,
    max_model_len=64,
    num_rows=5,
    block_bytes=4096,
    max_steps_in_flight=2,
)


def test_it_is_the_same_after_its_way_through_a_pipe() -> None:
    assert pickle.loads(pickle.dumps(INFO)) == INFO


def test_it_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        INFO.num_blocks = 4  # type: ignore[misc]


def test_what_nobody_asks_for_need_not_be_measured() -> None:
    assert INFO.kv_fingerprint is None
    assert INFO.copy_bytes_per_second is None
