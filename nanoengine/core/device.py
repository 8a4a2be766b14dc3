"""Device: a CPU or a GPU, and its queue of work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.meminfo import free_ram

CPU_FRACTION, CPU_CAP = 0.5, 4 << 30
"""The default size of the KV pool: half of the available RAM, and at most 4 GiB."""


class Device:
    """The CPU, which works at once, or one NVIDIA GPU and its current stream."""

    def __init__(self, torch_device: torch.device):
        self.torch_device, self.is_cuda = torch_device, torch_device.type == "cuda"
        self.num_threads = torch.get_num_threads()  # of all work, whatever torch uses later: sums depend on it
        self.available_ram = free_ram

    def run(self, work: Callable[[], object]) -> Callable[[], None]:
        """Queue work behind all earlier work. On a GPU it runs later: host memory that it reads must not be modified.

        Returns:
            A function that waits until all queued work is done, and raises its error.
        """
        if self.is_cuda:
            with torch.cuda.device(self.torch_device):
                work()
            return torch.cuda.current_stream(self.torch_device).record_event().synchronize
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self.num_threads)
            work()
        finally:
            torch.set_num_threads(before)
        return lambda: None

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """Unset host memory that the device can read (pinned for a GPU). It is reused only after the copies from it."""
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self.is_cuda)

    def send(self, values: np.ndarray) -> Tensor:
        """A tensor on the device with these values, without waiting for anything."""
        host = self.host_tensor(values.size, torch.from_numpy(values).dtype)
        host.numpy()[:] = values.reshape(-1)
        return host.to(self.torch_device, non_blocking=True).view(values.shape)

    def available(self) -> int:
        """Bytes of free memory."""
        return torch.cuda.mem_get_info(self.torch_device)[0] if self.is_cuda else self.available_ram()

    def kv_bytes(self, utilization: float, num_needed: Callable[[], int], later: int = 0) -> int:
        """Bytes for the KV pool. GPU: the fraction `utilization` of its memory, minus the bytes in use and the peak of the
        largest steps, which `num_needed` measures. CPU: a fraction of the free memory without `later` bytes."""
        if not self.is_cuda:
            return int(min(CPU_CAP, CPU_FRACTION * (self.available() - later)))
        needed = num_needed()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total * utilization) - (total - free) - needed


def open_device(name: str) -> Device:
    """The device of that name; "auto": a GPU if there is one.

    Raises:
        InvalidConfig: no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.init()
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InvalidConfig(f"device is {shown(name)}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device is {shown(name)}: it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise InvalidConfig(f"device is {shown(name)}, but torch sees {torch.cuda.device_count()} GPUs")
    return Device(device)
