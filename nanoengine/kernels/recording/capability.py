"""Recordings of steps as a capability of the engine."""

from __future__ import annotations

import torch

from nanoengine.core.capability import Capability
from nanoengine.core.errors import KVCacheTooSmall
from nanoengine.core.startup import Startup
from nanoengine.kernels.recording.buckets import (
    DRAFTED_TOKENS,
    MOST_ON_CPU,
    Bucket,
    decode_buckets,
    drafted_buckets,
    prompt_buckets,
)
from nanoengine.kernels.recording.options import RecordingOptions
from nanoengine.kernels.recording.recorded_steps import RecordedSteps, Recorder


class Recording(Capability):
    options = RecordingOptions

    def runner(self, startup: Startup) -> None:
        if self._can_record(startup):
            try:
                startup.runner.recorder = self._record(startup)
            except torch.OutOfMemoryError as error:
                raise KVCacheTooSmall(
                    "the CUDA graphs do not fit beside the KV pool: lower gpu_memory_utilization, kv_cache_memory, num_kv_blocks "
                    "or max_num_seqs, or set enforce_eager=True"
                ) from error

    def _can_record(self, startup: Startup) -> bool:
        """Whether everything in a step can be recorded; on a CPU that is calls of the native kernels' C functions."""
        if startup.config.of(RecordingOptions).enforce_eager or startup.runs_eagerly:
            return False
        if startup.device.torch_device.type == "cpu":
            return startup.kernels.name == startup.backend.name == "native"
        return startup.kernels.capturable and getattr(startup.backend, "capturable", False)

    def _record(self, startup: Startup) -> RecordedSteps:
        on_cpu, backend = startup.device.torch_device.type == "cpu", startup.backend
        max_len = -(-startup.max_model_len // startup.block_size) * startup.block_size
        steps = RecordedSteps(
            startup.runner,
            _recorder(startup.device.torch_device),
            self._buckets(startup, on_cpu=on_cpu),
            max_len,
            reads_shared_once=getattr(backend, "reads_shared_once", False),
        )
        if not on_cpu:
            steps.record_all(use_tqdm=startup.use_tqdm)
        return steps

    def _buckets(self, startup: Startup, *, on_cpu: bool) -> list[Bucket]:
        if on_cpu:
            plain = [Bucket(False, size, 1) for size in range(1, min(startup.num_rows, MOST_ON_CPU) + 1)]
            most = min(startup.most_drafts + 1, startup.config.max_num_batched_tokens)
            return plain + [Bucket(False, 1, tokens) for tokens in range(2, most + 1)]
        config, shapes = startup.config, decode_buckets(startup.num_rows)
        if getattr(startup.backend, "captures_prompts", False):
            # Steps with drafts leave states as they were: they are not replayed.
            if (num_drafts := startup.most_drafts) and startup.state_shapes is None:
                most = min(startup.num_rows, config.max_num_batched_tokens // DRAFTED_TOKENS[-1])
                shapes += drafted_buckets(most, num_drafts)
            whole = getattr(startup.backend, "knows_whole_prompts", False)
            shapes += prompt_buckets(config.max_num_batched_tokens, startup.max_model_len, whole=whole)
        return shapes

    def describe_itself(self, startup: Startup) -> str:
        kind = "recorded steps" if startup.device.torch_device.type == "cpu" else "CUDA graphs"
        recorder = startup.runner.recorder
        return f"{len(recorder) if isinstance(recorder, RecordedSteps) else 'no'} {kind}"


def _recorder(device: torch.device) -> Recorder:
    if device.type == "cpu":
        from nanoengine.kernels.recording.cpu_recorder import CpuRecorder

        return CpuRecorder()
    from nanoengine.kernels.recording.cuda_recorder import CudaRecorder

    return CudaRecorder(device)
