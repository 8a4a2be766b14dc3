"""CudaRecorder: captures CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class CudaRecorder:
    """Captures CUDA graphs. They share all memory, since only one runs at a time: a result is good until the next runs."""

    records_ahead = True

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device
        self._memory = torch.cuda.graph_pool_handle()
        self._is_first = True

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.cuda.device(self.torch_device):
            side = _capture_stream(self.torch_device)
            side.wait_stream(torch.cuda.current_stream())
            # cuBLAS keeps one work space per stream, and torch throws it away when any graph is reset (since 2.12). So that no
            # recorder's graphs use memory of another's, it is allocated again in theirs.
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
            result = _not_held(result)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def _not_held(tensor: Tensor) -> Tensor:
    """The same numbers, without a hold on their memory: a graph that is captured later may use it, too."""
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return same.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


@cache
def _capture_stream(torch_device: torch.device) -> torch.cuda.Stream:
    """One for all recorders on a device: cuBLAS keeps up to 32 MiB for each stream that it ever saw."""
    return torch.cuda.Stream(torch_device)
