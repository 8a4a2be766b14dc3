"""The runner: what it makes of options and machine, what it says about it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.config import EngineConfig
from nanoengine.errors import EngineClosed, InvalidConfig, KVCacheTooSmall, ModelNotFound
from nanoengine.runner import kv_sizing
from nanoengine.runner import model_runner as module
from nanoengine.runner.model_runner import ModelRunner
from tests.runner.batches import prefill
from tests.runner.conftest import MakeRunner, shape
from tests.support import num_weights

MODEL_LIMIT = 512
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 KV heads, head_dim 16, float32


def pool_bytes(runner: ModelRunner) -> int:
    assert runner.kv_cache is not None
    return sum(tensor.numel() * tensor.itemsize for layer in runner.kv_cache.layers for tensor in layer)


# ---- the start-up line


def test_the_start_up_line_says_what_runs_where_and_how(make: MakeRunner, folder: Path) -> None:
    line = make(max_num_seqs=7, max_num_batched_tokens=99, kernels="torch").describe()
    for part in (
        str(folder),
        "Qwen3ForCausalLM",
        "float32",
        f"cpu, {torch.get_num_threads()} threads",
        "kernels: torch (",
        "attention: torch (",
        "no CUDA graphs",
        "64 blocks x 16 tokens (num_kv_blocks)",
        "max_model_len 512",
        "at most 7 sequences and 99 tokens a step",
    ):
        assert part in line
    assert f"{64 * 16 * BYTES_PER_TOKEN / 2**20:.0f} MiB" in line
    assert "lowered" not in line
    assert "\n" not in line


def test_the_start_up_line_is_logged_once(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanoengine"):
        runner = make()
    assert [record.getMessage() for record in caplog.records] == [runner.describe()]


def test_the_start_up_line_counts_the_parameters(make: MakeRunner) -> None:
    runner = make()
    assert f"{num_weights(runner.model) / 1e6:.1f} M parameters" in runner.describe()


# ---- the size of the pool


def test_num_kv_blocks_are_usable_ones_and_the_null_block_comes_on_top(make: MakeRunner) -> None:
    runner = make(num_kv_blocks=40)
    assert runner.num_blocks == 40
    assert pool_bytes(runner) == 41 * 16 * BYTES_PER_TOKEN


def test_kv_cache_memory_is_never_exceeded_and_used_to_the_last_block(make: MakeRunner) -> None:
    budget = 1_000_000
    runner = make(num_kv_blocks=None, kv_cache_memory=budget)
    assert budget - 16 * BYTES_PER_TOKEN < pool_bytes(runner) <= budget
    assert "(kv_cache_memory)" in runner.describe()


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_the_pool_in_bytes_does_not_depend_on_the_block_size(make: MakeRunner, block_size: int) -> None:
    runner = make(num_kv_blocks=None, kv_cache_memory=600_000, block_size=block_size)
    assert 0 <= 600_000 - pool_bytes(runner) < block_size * BYTES_PER_TOKEN


def test_by_default_the_pool_comes_from_free_memory(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sizing, "cpu_kv_bytes", lambda: 2_000_000)
    runner = make(num_kv_blocks=None)
    assert 2_000_000 - 16 * BYTES_PER_TOKEN < pool_bytes(runner) <= 2_000_000
    assert "available RAM" in runner.describe()


def test_the_automatic_pool_is_no_larger_than_what_can_run_at_once(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sizing, "cpu_kv_bytes", lambda: 1 << 33)
    runner = make(num_kv_blocks=None, max_num_seqs=3, max_model_len=100)
    assert runner.num_blocks == 3 * 7
    assert "(max_num_seqs x max_model_len)" in runner.describe()


@pytest.mark.parametrize(
    "options", [{"num_kv_blocks": 10**9}, {"num_kv_blocks": None, "kv_cache_memory": 10**13}], ids=str
)
def test_a_pool_that_the_device_has_no_memory_for_names_the_knobs(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(module, "KVCache", refuse)  # some machines would promise what they do not have
    with pytest.raises(InvalidConfig, match=r"KV pool of \d{7,} blocks takes \d{13,} bytes.*lower num_kv_blocks"):
        make(**options)


def test_max_model_len_is_the_models_own_if_it_fits(make: MakeRunner) -> None:
    assert make(num_kv_blocks=MODEL_LIMIT // 16).max_model_len == MODEL_LIMIT


def test_max_model_len_is_lowered_to_the_pool_and_said_so(make: MakeRunner) -> None:
    runner = make(num_kv_blocks=5)
    assert runner.max_model_len == 80
    assert f"max_model_len 80 (lowered from {MODEL_LIMIT}" in runner.describe()


def test_max_model_len_asked_for_is_kept(make: MakeRunner) -> None:
    runner = make(num_kv_blocks=7, max_model_len=100)
    assert runner.max_model_len == 100
    assert "lowered" not in runner.describe()


def test_rows_have_room_for_the_longest_sequence_and_for_all_that_run(make: MakeRunner) -> None:
    runner = make(max_model_len=100, max_num_seqs=5)
    assert runner.rows.width == 7
    assert runner.num_rows == runner.rows.nobody == 5
    assert make(max_num_seqs=50, max_num_batched_tokens=20).num_rows == 20, "each computes a token in a step"


def test_a_pool_too_small_for_one_sequence_is_a_named_error(make: MakeRunner) -> None:
    with pytest.raises(KVCacheTooSmall, match="max_model_len"):
        make(num_kv_blocks=6, max_model_len=100)


def test_max_model_len_beyond_the_models_positions_is_refused(make: MakeRunner) -> None:
    with pytest.raises(InvalidConfig, match=r"max_model_len is 513.*512 positions"):
        make(max_model_len=513)


# ---- dtype and device


@pytest.mark.parametrize(
    ("checkpoint", "native", "expected"),
    [
        ("float32", True, torch.float32),
        ("float32", False, torch.float32),
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float16),
        ("float16", False, torch.float32),
    ],
)
def test_dtype_auto_is_the_checkpoints_where_the_cpu_computes_it_natively(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, checkpoint: str, native: bool, expected: torch.dtype
) -> None:
    for check in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, check, lambda: native, raising=False)
    runner = make(model={"dtype": checkpoint})
    assert runner.dtype == expected
    assert runner.model.embed_tokens(torch.tensor([1])).dtype == expected
    assert runner.kv_cache is not None
    assert {tensor.dtype for layer in runner.kv_cache.layers for tensor in layer} == {expected}


@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "float16"])
def test_dtype_auto_is_float32_where_torch_has_no_mkldnn(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    """The builds for macOS do not even have the operators that could be asked."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for check in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, check, lambda: pytest.fail("asked"), raising=False)
    assert make(model={"dtype": checkpoint}).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_asked_for_is_taken_whatever_the_checkpoints(make: MakeRunner, dtype: str) -> None:
    runner = make(dtype=dtype)
    assert runner.dtype == getattr(torch, dtype)
    assert dtype in runner.describe()


def test_torchs_default_dtype_is_left_alone(make: MakeRunner) -> None:
    before = torch.get_default_dtype()
    make(dtype="bfloat16")
    assert torch.get_default_dtype() == before


def test_device_auto_is_the_cpu_where_there_is_no_gpu(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make(device="auto").device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_cuda_is_a_named_error(make: MakeRunner, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfig, match=f"'{device}'.*0 CUDA devices.*device='cpu'"):
        make(device=device)


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cuda:0:0", "cuda:1.5", "tpu", "cpu:0", "", 0, None])
def test_a_bad_device_is_a_named_error(make: MakeRunner, device: Any) -> None:
    with pytest.raises(InvalidConfig, match="device"):
        make(device=device)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_num_threads_is_how_many_torch_computes_with(make: MakeRunner, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        line = make(num_threads=num_threads).describe()
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert f"cpu, {num_threads} threads" in line


def test_without_num_threads_torchs_own_choice_stays(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("set"))
    make()


def test_an_unknown_attention_backend_is_a_named_error(make: MakeRunner) -> None:
    with pytest.raises(InvalidConfig, match="attention_backend is 'flashy'"):
        make(attention_backend="flashy")


def test_a_folder_without_weights_is_a_named_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="safetensors"):
        ModelRunner(EngineConfig(model="x", device="cpu"), shape(folder), tmp_path, use_tqdm=False)


# ---- steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"async_scheduling": True}, 2),
        ({"async_scheduling": False}, 1),
    ],
    ids=str,
)
def test_steps_overlap_where_that_is_asked_for(make: MakeRunner, options: dict[str, bool], expected: int) -> None:
    runner = make(**options)
    assert runner.max_steps_in_flight == expected
    assert ("overlapping steps" in runner.describe()) == (expected == 2)
    assert ("one step at a time" in runner.describe()) == (expected == 1)


def test_a_closed_runner_says_so_and_holds_no_memory(make: MakeRunner) -> None:
    runner = make()
    runner.close()
    assert runner.kv_cache is None
    assert not hasattr(runner, "model")
    with pytest.raises(EngineClosed):
        runner.launch(prefill(5))
