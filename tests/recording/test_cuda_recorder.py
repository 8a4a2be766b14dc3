"""What a recording asks of torch.cuda, in which order, seen on stand-ins that write it down: no GPU is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.recording import cuda_recorder as module
from nanoengine.recording.cuda_recorder import CudaRecorder

DEVICE = torch.device("cuda", 0)


class Watched:
    """Stands in for torch.cuda.

    Attributes:
        calls: what happened, in order.
        streams: how many were made.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        self.streams = self.pools = 0
        watched = self

        class Stream:
            def __init__(self, _: torch.device | None = None):
                watched.streams += 1

            def wait_stream(self, _: Stream) -> None:
                pass

        class Graph:
            def replay(self) -> None:
                watched.calls.append("replay")

        current = object.__new__(Stream)
        fakes: dict[str, Any] = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "device": self.during(""),
            "stream": self.during("side stream"),
            "current_stream": lambda *_: current,
            "synchronize": lambda *_: None,
            "graph_pool_handle": self.new_pool,
            "graph": self.capturing,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: self.calls.append("clear"), raising=False)
        module._capture_stream.cache_clear()

    def during(self, name: str) -> Any:
        @contextmanager
        def entered(_: object) -> Iterator[None]:
            self.calls += [name] if name else []
            yield

        return entered

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def capturing(self, _: object, pool: int, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.calls.append(f"capture in {pool} on {id(stream)}")
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    yield Watched(monkeypatch)
    module._capture_stream.cache_clear()


def work() -> Tensor:
    return torch.zeros(1)


def test_all_recordings_on_a_device_share_one_stream(cuda: Watched) -> None:
    """cuBLAS keeps a work space of up to 32 MiB for every stream."""
    for _ in range(2):
        recorder = CudaRecorder(DEVICE)
        for _ in range(5):
            recorder.record(work)
    assert cuda.streams == 1
    assert len({call.split(" on ")[1] for call in cuda.calls if call.startswith("capture")}) == 1


def test_the_work_space_of_products_lies_in_the_memory_of_the_recordings(cuda: Watched) -> None:
    """It is thrown away before the first warm-up, which must not write into another's, and before the first capture, which makes
    it anew, for itself.
    """
    first, second = CudaRecorder(DEVICE), CudaRecorder(DEVICE)
    first.record(work)
    first.record(work)
    second.record(work)
    side = cuda.calls[3].split(" on ")[1]
    captures = [f"capture in {pool} on {side}" for pool in (1, 1, 2)]
    assert cuda.calls == [
        *("clear", "side stream", "clear", captures[0]),
        *("side stream", captures[1]),
        *("clear", "side stream", "clear", captures[2]),
    ]


def test_a_replay_gives_the_recorded_result(cuda: Watched) -> None:
    replay = CudaRecorder(DEVICE).record(work)
    cuda.calls.clear()
    assert replay() is replay()
    assert cuda.calls == ["replay"] * 2
