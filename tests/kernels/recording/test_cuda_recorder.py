"""What a recording asks of torch.cuda, in which order, seen on a stand-in: no GPU is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanoengine.kernels.recording import cuda_recorder as module
from nanoengine.kernels.recording.cuda_recorder import CudaRecorder

DEVICE = torch.device("cuda", 0)
SEEN = ("clear", "stream", "graph", "CUDAGraph().replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """In place of torch.cuda; each recorder has a memory of another number."""
    stand_in = MagicMock()
    stand_in.graph_pool_handle.side_effect = range(1, 9)
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", stand_in.clear, raising=False)
    module._capture_stream.cache_clear()
    yield stand_in
    module._capture_stream.cache_clear()


def calls(cuda: MagicMock) -> list[tuple[str, int | None]]:
    """Those that matter here, and the memory that a capture is given."""
    return [(name, options.get("pool")) for name, _, options in cuda.mock_calls if name in SEEN]


def work() -> Tensor:
    return torch.zeros(1)


def test_all_recordings_on_a_device_share_a_stream_and_those_of_a_recorder_the_work_space(cuda: MagicMock) -> None:
    """cuBLAS keeps up to 32 MiB for every stream. They are thrown away before the first warm-up, which must not write into
    another's, and before the first capture, which makes its own.
    """
    first, second = CudaRecorder(DEVICE), CudaRecorder(DEVICE)
    for recorder in (first, first, second):
        recorder.record(work)
    clear, side = ("clear", None), ("stream", None)
    one, two = ("graph", 1), ("graph", 2)
    assert calls(cuda) == [clear, side, clear, one, side, one, clear, side, clear, two]
    cuda.Stream.assert_called_once_with(DEVICE)
    for _, _, options in (call for call in cuda.mock_calls if call[0] == "graph"):
        assert options["stream"] is cuda.Stream()
        assert options["capture_error_mode"] == "thread_local"


@pytest.mark.usefixtures("cuda")
def test_a_result_is_where_it_was_recorded_and_holds_no_memory() -> None:
    """Another recording may use that memory: so all of an engine have their logits there."""
    made: list[tuple[object, ...]] = []

    def views() -> Tensor:
        whole = torch.zeros(4, 6, dtype=torch.float32)
        made.append((whole.data_ptr() + 4, StorageWeakRef(whole.untyped_storage())))
        return whole[:3, 1:]

    found = CudaRecorder(DEVICE).record(views)()
    address, storage = made[-1]
    assert (found.data_ptr(), found.shape, found.stride(), found.dtype) == (address, (3, 5), (6, 1), torch.float32)
    assert isinstance(storage, StorageWeakRef)
    assert storage.expired()


def test_a_replay_gives_the_recorded_result(cuda: MagicMock) -> None:
    replay = CudaRecorder(DEVICE).record(work)
    cuda.reset_mock()
    assert replay() is replay()
    assert calls(cuda) == [("CUDAGraph().replay", None)] * 2
