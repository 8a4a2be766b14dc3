"""Startup: what it makes of options and machine, what it says about that, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.config import EngineConfig
from nanoengine.core.attention import AttentionMetadata
from nanoengine.errors import InvalidConfig, KVCacheTooSmall, ModelNotFound
from nanoengine.models.safetensors_folder import SafetensorsFolder
from nanoengine.runner import kv_sizing
from nanoengine.runner import startup as module
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.startup import Startup, start_runner
from tests.runner.conftest import MakeRunner, MakeStartup
from tests.runner.options import shape
from tests.runner.plans import chain, execute
from tests.support import num_weights

MODEL_LIMIT = 512
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 KV heads, head_dim 16, float32


def pool_bytes(runner: ModelRunner) -> int:
    assert runner.kv_cache is not None
    return sum(tensor.numel() * tensor.itemsize for layer in runner.kv_cache.layers for tensor in layer)


def dtype_of(runner: ModelRunner) -> torch.dtype:
    assert runner.kv_cache is not None
    return runner.kv_cache.layers[0][0].dtype


Describe = Callable[..., str]


@pytest.fixture
def describe(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> Describe:
    """The start-up line of a runner with some options."""

    def start(**options: Any) -> str:
        caplog.clear()
        with caplog.at_level("INFO", logger="nanoengine"):
            make(**options)
        (record,) = caplog.records
        return record.getMessage()

    return start


# ---- the start-up line


def test_the_start_up_line_says_what_runs_where_and_how(describe: Describe, folder: Path) -> None:
    line = describe(max_num_seqs=7, max_num_batched_tokens=99, kernels="torch")
    for part in (
        str(folder),
        "Qwen3ForCausalLM",
        "float32",
        f"cpu, {torch.get_num_threads()} threads",
        "kernels: torch (",
        "attention: torch (",
        "no recorded steps",
        "64 blocks x 16 tokens (num_kv_blocks)",
        "max_model_len 512",
        "one step at a time",
        "prefill_first, at most 7 sequences and 99 tokens a step",
    ):
        assert part in line
    assert f"{64 * 16 * BYTES_PER_TOKEN / 2**20:.0f} MiB" in line
    for part in ("lowered", "host memory", "on disk", "\n"):
        assert part not in line


def test_the_start_up_line_is_that_of_the_runner(begin: MakeStartup, describe: Describe) -> None:
    startup = begin(max_num_seqs=7)
    runner = startup.build()
    assert describe(max_num_seqs=7) == startup.describe(runner)
    runner.close()


def test_the_start_up_line_counts_the_parameters(make: MakeRunner, describe: Describe) -> None:
    assert f"{num_weights(make().model) / 1e6:.1f} M parameters" in describe()


def test_the_start_up_line_names_the_policy(describe: Describe) -> None:
    assert "mixed, at most 256 sequences" in describe(scheduling_policy="mixed")


def test_the_start_up_line_says_why_an_attention_backend_was_passed_over(begin: MakeStartup) -> None:
    startup = begin()
    startup.passed_over = "fast: it is not here"
    runner = startup.build()
    assert "; not fast: it is not here), no recorded steps" in startup.describe(runner)
    runner.close()


# ---- the size of the pool


def test_num_kv_blocks_are_usable_ones_and_the_null_block_comes_on_top(make: MakeRunner) -> None:
    runner = make(num_kv_blocks=40)
    assert runner.info.num_blocks == 40
    assert pool_bytes(runner) == 41 * 16 * BYTES_PER_TOKEN


def test_kv_cache_memory_is_never_exceeded_and_used_to_the_last_block(make: MakeRunner, describe: Describe) -> None:
    budget = 1_000_000
    runner = make(num_kv_blocks=None, kv_cache_memory=budget)
    assert budget - 16 * BYTES_PER_TOKEN < pool_bytes(runner) <= budget
    assert runner.info.block_bytes == 16 * BYTES_PER_TOKEN
    assert "(kv_cache_memory)" in describe(num_kv_blocks=None, kv_cache_memory=budget)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_the_pool_in_bytes_does_not_depend_on_the_block_size(make: MakeRunner, block_size: int) -> None:
    runner = make(num_kv_blocks=None, kv_cache_memory=600_000, block_size=block_size)
    assert 0 <= 600_000 - pool_bytes(runner) < block_size * BYTES_PER_TOKEN


@pytest.mark.parametrize(("kernels", "block_size"), [("torch", 5), ("native", 16), ("auto", 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_pool_holds_about_as_many_times_more_as_its_numbers_are_smaller(
    make: MakeRunner, describe: Describe, native_folder: Path, kernels: str, block_size: int, dtype: str
) -> None:
    """32 bytes and a scale of 4 for each token of a head; files and host memory have blocks of the same size."""
    budget, of_block = 600_000, block_size * 2 * 2 * 2 * (32 + 4)
    options = {
        "at": native_folder,
        "num_kv_blocks": None,
        "kv_cache_memory": budget,
        "dtype": dtype,
        "kernels": kernels,
    }
    runner = make(**options, block_size=block_size, kv_cache_dtype="int8")
    assert dtype_of(runner) is torch.int8
    assert runner.info.block_bytes == runner.mover.block_bytes == of_block
    assert budget - of_block < pool_bytes(runner) <= budget
    other = make(**options, block_size=block_size, kv_cache_dtype="auto")
    times = runner.info.num_blocks / other.info.num_blocks
    assert times == pytest.approx(dtype_of(other).itemsize * 32 / 36, rel=0.1)
    line = describe(**options, block_size=block_size, kv_cache_dtype="int8")
    assert re.search(r"KV pool: \d+ MiB of int8 = \d+ blocks", line)


def test_by_default_the_pool_comes_from_free_memory(
    make: MakeRunner, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sizing, "cpu_kv_bytes", lambda: 2_000_000)
    runner = make(num_kv_blocks=None)
    assert 2_000_000 - 16 * BYTES_PER_TOKEN < pool_bytes(runner) <= 2_000_000
    assert "available RAM" in describe(num_kv_blocks=None)


def test_the_automatic_pool_is_no_larger_than_what_can_run_at_once(
    make: MakeRunner, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sizing, "cpu_kv_bytes", lambda: 1 << 33)
    options = {"num_kv_blocks": None, "max_num_seqs": 3, "max_model_len": 100}
    assert make(**options).info.num_blocks == 3 * 7
    assert "(max_num_seqs x max_model_len)" in describe(**options)


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
    assert make(num_kv_blocks=MODEL_LIMIT // 16).info.max_model_len == MODEL_LIMIT


def test_max_model_len_is_lowered_to_the_pool_and_said_so(make: MakeRunner, describe: Describe) -> None:
    assert make(num_kv_blocks=5).info.max_model_len == 80
    assert f"max_model_len 80 (lowered from {MODEL_LIMIT}" in describe(num_kv_blocks=5)


def test_max_model_len_asked_for_is_kept(make: MakeRunner, describe: Describe) -> None:
    assert make(num_kv_blocks=7, max_model_len=100).info.max_model_len == 100
    assert "lowered" not in describe(num_kv_blocks=7, max_model_len=100)


def test_rows_have_room_for_the_longest_sequence_and_for_all_that_run(make: MakeRunner) -> None:
    runner = make(max_model_len=100, max_num_seqs=5)
    assert [table.shape for table in runner.rows.tables] == [(5 + 1, 7)]
    assert runner.info.num_rows == runner.rows.padding_row == 5
    narrow = make(max_num_seqs=50, max_num_batched_tokens=20)
    assert narrow.info.num_rows == narrow.rows.padding_row == 20, "each computes a token in a step"


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
    assert dtype_of(make(model={"dtype": checkpoint})) == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_asked_for_is_taken_whatever_the_checkpoints(make: MakeRunner, describe: Describe, dtype: str) -> None:
    assert dtype_of(make(dtype=dtype)) == getattr(torch, dtype)
    assert f", {dtype} on " in describe(dtype=dtype)


def test_torchs_default_dtype_is_left_alone(make: MakeRunner) -> None:
    before = torch.get_default_dtype()
    make(dtype="bfloat16")
    assert torch.get_default_dtype() == before


def test_device_auto_is_the_cpu_where_there_is_no_gpu(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make(device="auto").stream.torch_device == torch.device("cpu")


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
def test_num_threads_is_how_many_torch_computes_with(describe: Describe, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        line = describe(num_threads=num_threads)
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
        start_runner(EngineConfig(model="x", device="cpu"), shape(folder), tmp_path, use_tqdm=False)


# ---- steps in flight


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"async_scheduling": True}, 2),
        ({"async_scheduling": False}, 1),
        ({"async_scheduling": True, "preemption_mode": "swap", "kv_host_memory": 1 << 20}, 2),
    ],
    ids=str,
)
def test_steps_overlap_where_that_is_asked_for(
    make: MakeRunner, describe: Describe, options: dict[str, Any], expected: int
) -> None:
    assert make(**options).info.max_steps_in_flight == expected
    line = describe(**options)
    assert ("overlapping steps" in line) == (expected == 2)
    assert ("one step at a time" in line) == (expected == 1)


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (True, 2), (False, 1)])
def test_on_a_gpu_steps_overlap_unless_told(begin: MakeStartup, asked: bool | None, expected: int) -> None:
    startup = begin(async_scheduling=asked)
    startup.device = torch.device("cuda", 0)
    assert startup.max_steps_in_flight == expected


# ---- lower tiers


def test_without_lower_tiers_nothing_is_taken_or_measured(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsFolder, "fingerprint", lambda _: pytest.fail("read"))
    monkeypatch.setattr(module.KVMover, "measure_copy_rate", lambda _: pytest.fail("measured"))
    info = make().info
    assert (info.num_host_blocks, info.copy_bytes_per_second, info.kv_fingerprint) == (0, None, None)


def test_the_host_tier_is_as_large_as_was_asked_for(make: MakeRunner, describe: Describe) -> None:
    options = {"preemption_mode": "swap", "kv_host_memory": 7 * 16 * BYTES_PER_TOKEN + 5}
    info = make(**options).info
    assert info.num_host_blocks == 7
    assert info.copy_bytes_per_second is None, "nobody chooses by it"
    assert "; 7 blocks in host memory; " in describe(**options)


def test_where_swapping_is_a_choice_copies_are_measured(make: MakeRunner) -> None:
    info = make(preemption_mode="auto", kv_host_memory=1 << 20).info
    assert info.copy_bytes_per_second is not None
    assert info.copy_bytes_per_second > 0


def test_files_have_host_memory_to_go_through(make: MakeRunner, describe: Describe, tmp_path: Path) -> None:
    options = {"kv_disk_path": str(tmp_path), "max_model_len": 320}
    assert make(**options).info.num_host_blocks == 320 // 16
    assert f"; 20 blocks in host memory; KV on disk: {tmp_path}; " in describe(**options)


def test_the_fingerprint_is_of_all_that_kv_depends_on(make: MakeRunner, native_folder: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"at": native_folder},
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"model": {"rms_norm_eps": 0.5}},
    ]
    disk = {"kv_disk_path": str(tmp_path), "kernels": "torch"}
    found = [make(**disk, **change).info.kv_fingerprint for change in changes]
    assert all(re.fullmatch("[0-9a-f]{32}", name or "") for name in found)
    assert len(set(found)) == len(found)
    assert make(**disk, num_kv_blocks=7, max_num_seqs=3).info.kv_fingerprint == found[0]


@pytest.mark.parametrize(("kind", "differs"), [("dynamic", True), ("linear", False)])
def test_the_fingerprint_tells_lengths_apart_where_angles_depend_on_them(
    make: MakeRunner, tmp_path: Path, kind: str, differs: bool
) -> None:
    model = {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}}
    lengths = (500, 600) if differs else (400, 500)  # of 512 that were trained
    options = {"kv_disk_path": str(tmp_path), "kernels": "torch", "model": model}
    short, long = (make(**options, max_model_len=length).info.kv_fingerprint for length in lengths)
    assert (short != long) == differs


def test_more_host_memory_than_there_is_is_refused(make: MakeRunner) -> None:
    with pytest.raises(InvalidConfig, match=rf"kv_host_memory is {1 << 50} bytes, but \d+ bytes of RAM are available"):
        make(kv_host_memory=1 << 50)


# ---- kernels that are compiled


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 1, "block_size": 2}, {"max_num_batched_tokens": 3, "max_num_seqs": 2}, {"max_model_len": 2}],
    ids=str,
)
def test_small_steps_that_compile_kernels_leave_nothing_behind(
    make: MakeRunner, begin: MakeStartup, options: dict[str, int]
) -> None:
    startup = begin(**options)
    compiled = startup.build()
    startup._compile_kernels(compiled)
    (plan,) = chain({0: [1]}, 1)
    assert execute(compiled, plan) == execute(make(**options), plan)
    compiled.close()


# ---- measuring a GPU


def fake_cuda(monkeypatch: pytest.MonkeyPatch, free: tuple[int, ...] = ()) -> None:
    """All of the sizing but the GPU: the steps run on the CPU, and torch.cuda answers from the facts below.

    Args:
        free: bytes that are free, question after question, before at last 90,000 are.
    """
    answers = iter(free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(answers, 90_000), 100_000))


def table_bytes(startup: Startup) -> int:
    """Of the block tables of all rows and the padding row, for the longest sequence."""
    max_len = startup.config.max_model_len or startup.model_config.max_position_embeddings
    return len(startup.groups) * (startup.num_rows + 1) * -(-max_len // startup.config.block_size) * 4


def test_the_gpu_pool_is_what_a_step_of_full_size_leaves(begin: MakeStartup, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    startup = begin(max_num_batched_tokens=1100, max_num_seqs=7, gpu_memory_utilization=0.5)
    sizes = []
    forward = startup.model.forward

    def counting(input_ids: Tensor, positions: Tensor, metadata: list[AttentionMetadata]) -> Tensor:
        sizes.append(len(input_ids))
        return forward(input_ids, positions, metadata)

    monkeypatch.setattr(startup.model, "forward", counting)
    assert startup._measure_gpu_kv_bytes() == 50_000 - 10_000 - 700 - table_bytes(startup)
    assert sizes == [1100, 1100, 7], "prefills of few and of many prompts, then the largest decode step"


def test_the_pool_of_a_gpu_takes_what_was_measured(begin: MakeStartup, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(num_blocks: int, *others: Any) -> KVCache:
        *shape, _ = others
        return KVCache(num_blocks, *shape, torch.device("cpu"))

    monkeypatch.setattr(module, "KVCache", on_cpu)
    startup = begin(num_kv_blocks=None)
    startup.device = torch.device("cuda", 0)
    monkeypatch.setattr(startup, "_measure_gpu_kv_bytes", lambda: 40 * startup.block_bytes + 7)
    compiled: list[ModelRunner] = []
    monkeypatch.setattr(startup, "_compile_kernels", compiled.append)
    runner = startup.build()
    assert runner.info.num_blocks == 39, "one of them is the null block"
    assert compiled == [runner], "Triton's kernels, before the first request"
    runner.close()


@pytest.mark.parametrize(
    ("max_num_seqs", "free", "graph_bytes"),
    [
        (6, (80_000, 75_000, 74_800), 5_000 + 3 * 200),  # [1, 2, 4, 6]
        (17, (80_000, 75_000, 74_800), 5_000 + 5 * 200),  # [1, 2, 4, 8, 16, 17]
        (6, (80_000, 75_000, 76_000), 5_000),  # somebody gave memory back meanwhile
        (1, (80_000, 75_000), 5_000),  # there is no other
    ],
    ids=str,
)
def test_the_gpu_pool_leaves_room_for_the_graphs(
    begin: MakeStartup,
    recordable: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    free: tuple[int, ...],
    graph_bytes: int,
) -> None:
    """The largest is recorded, and one more: each further one takes as much as that."""
    startup = begin(**recordable | {"max_num_seqs": max_num_seqs, "gpu_memory_utilization": 0.5})
    fake_cuda(monkeypatch, free)
    assert startup._measure_gpu_kv_bytes() == 50_000 - 10_000 - 700 - table_bytes(startup) - graph_bytes
    assert len(recordable["stream"].recordings) == len(free) - 1


def test_the_gpu_pool_leaves_room_for_the_graphs_of_prompts(
    begin: MakeStartup, recordable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchAttention, "captures_prompts", True)
    monkeypatch.setattr(module, "prompt_sizes", lambda *_: [8, 16, 24])
    startup = begin(**recordable | {"max_num_seqs": 6, "gpu_memory_utilization": 0.5})
    fake_cuda(monkeypatch, (80_000, 77_000, 76_900, 76_900, 75_900, 75_800))
    assert startup._measure_gpu_kv_bytes() == 50_000 - 10_000 - 700 - table_bytes(startup) - (3_000 + 2 * 100) - (
        1_000 + 3 * 100
    )
    assert len(recordable["stream"].recordings) == 4


def test_the_gpu_pool_of_a_step_that_does_not_fit_names_the_knobs(
    begin: MakeStartup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake_cuda(monkeypatch)
    startup = begin(max_num_batched_tokens=1100, max_num_seqs=7)
    monkeypatch.setattr(startup.model, "forward", out_of_memory)
    with pytest.raises(KVCacheTooSmall, match=r"max_num_batched_tokens 1100 or max_num_seqs 7") as raised:
        startup._measure_gpu_kv_bytes()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_weights_or_graphs_that_do_not_fit_are_named_errors(
    make: MakeRunner, recordable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Startup, "_record", out_of_memory)
        with pytest.raises(KVCacheTooSmall, match=r"CUDA graphs do not fit beside the KV pool: .*enforce_eager=True"):
            make(**recordable)
    monkeypatch.setattr(module, "build_model", out_of_memory)
    with pytest.raises(InvalidConfig, match=r"the weights take \d+ bytes, more than is free on cpu"):
        make()
