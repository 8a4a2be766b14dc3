"""The device as the runner sees it: work that is done in order, perhaps later; events in that order to wait for; recordings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanoengine.recording.cpu_recorder import CpuRecorder


class Event(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Return when the device has got there; raises what went wrong on the way."""
        ...


class Stream(Protocol):
    """Where tensors live and work is done.

    Work may read host memory when its turn comes, so whatever is handed to it must not be written to again.
    """

    torch_device: torch.device
    can_record: bool
    records_ahead: bool
    """Whether all steps are recorded before the first comes; otherwise each size when it does, which is no more work than it."""

    def run(self, work: Callable[[], object]) -> None:
        """Do some work after all that was given before. On a GPU `work` itself is called at once and only launches kernels."""
        ...

    def event(self) -> Event:
        """The point after all work that was given so far."""
        ...

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """Unset host memory that the device can read by itself."""
        ...

    def recorder(self) -> Recorder:
        """For work that is to be replayed, if `can_record`."""
        ...


class Recorder(Protocol):
    """Records work that launches the same kernels on the same tensors every time."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Call `work`, and return what replays it; the result is the same tensor each time."""
        ...


class CpuStream:
    """Work is done when it is given."""

    torch_device = torch.device("cpu")
    can_record = True
    records_ahead = False

    def run(self, work: Callable[[], object]) -> None:
        work()

    def event(self) -> Event:
        return _Reached()

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def recorder(self) -> Recorder:
        return CpuRecorder()


class _Reached:
    def wait(self) -> None:
        pass


class CudaStream:
    """One stream of an NVIDIA GPU, the current one.

    Pinned memory comes from torch's allocator, which hands it out again only when the copies from it are over.
    """

    can_record = True
    records_ahead = True

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.device(self.torch_device):  # Triton launches on the current one
            work()

    def event(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaEvent(event)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def recorder(self) -> Recorder:
        return CudaRecorder(self.torch_device)


class CudaRecorder:
    """Captures CUDA graphs. They share memory, since only one of them runs at a time: a result is good until the next runs."""

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device
        self._memory = torch.cuda.graph_pool_handle()
        self._is_first = True

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.cuda.device(self.torch_device):
            side = _capture_stream(self.torch_device)
            side.wait_stream(torch.cuda.current_stream())
            # cuBLAS keeps one work space per stream, and torch throws it away when any graph is reset (since 2.12). So that no
            # recorder's graphs use memory of another's, it is made anew in their own.
            if self._is_first:
                torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.stream(side):
                work()  # compiles kernels, which a capture must not
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            if self._is_first:
                torch._C._cuda_clearCublasWorkspaces()
                self._is_first = False
            graph = torch.cuda.CUDAGraph()
            # Another thread may serve with another engine meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=side, capture_error_mode="thread_local"):
                result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def _capture_stream(torch_device: torch.device) -> torch.cuda.Stream:
    """One for all recorders on a device: cuBLAS keeps up to 32 MiB for each stream that it ever saw."""
    return torch.cuda.Stream(torch_device)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


def send(values: np.ndarray, stream: Stream) -> Tensor:
    """A tensor on the device with these values, without waiting for anything."""
    host = stream.host_tensor(values.size, torch.from_numpy(values).dtype)
    host.numpy()[:] = values
    return host.to(stream.torch_device, non_blocking=True)


def send_array(array: np.ndarray, stream: Stream) -> Tensor:
    """The same, of any shape."""
    return send(array.reshape(-1), stream).view(array.shape)


def open_stream(torch_device: torch.device) -> Stream:
    return CudaStream(torch_device) if torch_device.type == "cuda" else CpuStream()
