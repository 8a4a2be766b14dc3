"""KV that leaves the pool: recomputed, in host memory, on disk. Wherever it was, the tokens are those of a large pool.

The pool is full of NaN, so that a block which did not come back whole shows.
"""

from __future__ import annotations

import inspect
import logging
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.messages import StepPlan
from nanoengine.errors import NanoEngineError, StepFailed
from nanoengine.kv_offload.block_copier import BlockCopier
from nanoengine.kv_offload.kv_file import MAGIC, write_kv_file
from nanoengine.kv_offload.messages import NAME
from nanoengine.kv_offload.offload import OffloadStats
from tests.e2e.small_engine import assert_idle
from tests.support import byte_tokenizer, fill_kv_with_nan, model_runner, tiny_checkpoint

Tokens = list[list[int]]
OpenLLM = Callable[..., LLM]
BLOCK_BYTES = 16384  # of the tiny model below in float32
SMALL, LARGE = 8 * BLOCK_BYTES, 300 * BLOCK_BYTES
TINY_POOL: dict[str, Any] = {"num_kv_blocks": 15}
NUM_PROMPTS = 6
LENGTHS = [137 - 13 * i for i in range(NUM_PROMPTS)]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=15 + i, ignore_eos=True, n=1 + i % 3 // 2)
    for i in range(NUM_PROMPTS)
]


CACHED = [(length - 1) // 16 * 16 for length in LENGTHS]
"""Tokens of each prompt that a cache can have: full blocks, without the last token."""

NUM_COMPUTED = sum(
    length + (own.n - 1) * (length - cached) for length, cached, own in zip(LENGTHS, CACHED, PARAMS, strict=True)
)
"""Tokens of all prompts: what is behind the full blocks, each completion computes for itself."""


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory: pytest.TempPathFactory) -> OpenLLM:
    """Makes engines of a tiny model, with heads as the native kernels want them."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=32)

    def make(**options: Any) -> LLM:
        defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "num_kv_blocks": 400}
        llm = LLM(str(folder), device="cpu", use_tqdm=False, **defaults | options)
        fill_kv_with_nan(llm)
        return llm

    return make


def run(llm: LLM, prompts: Tokens, **options: Any) -> list[Tokens]:
    params = PARAMS[: len(prompts)]
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert_idle(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def moved(llm: LLM) -> OffloadStats:
    """What has left the pool, and come back."""
    found: OffloadStats = llm.metrics.offload
    return found


def computed(llm: LLM) -> int:
    """Tokens of prompts, so far."""
    return llm.metrics.steps.prefill_tokens


def kv_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    """Real text, a token for each byte; the prompts share nothing."""
    text = byte_tokenizer().encode(inspect.getsource(textwrap))
    return [text[100 * i : 100 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def right(open_llm: OpenLLM, prompts: Tokens) -> list[Tokens]:
    """What a pool with room for all computes."""
    with open_llm(enable_prefix_caching=False) as llm:
        tokens = run(llm, prompts)
        assert llm.engine.scheduler.num_preemptions == 0
        return tokens


# ---- preemption


def test_recompute_copies_nothing(open_llm: OpenLLM, prompts: Tokens, right: list[Tokens]) -> None:
    with open_llm(**TINY_POOL) as llm:
        assert run(llm, prompts) == right
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.metrics.offload is None


@pytest.mark.parametrize(
    ("kv_host_memory", "chunk", "kernels"),
    [(SMALL, 8192, "auto"), (SMALL, 40, "auto"), (LARGE, 8192, "auto"), (LARGE, 40, "auto"), (SMALL, 40, "torch")],
)
def test_swapped_blocks_come_back_as_they_were(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], kv_host_memory: int, chunk: int, kernels: str
) -> None:
    options = {"preemption_mode": "swap", "kv_host_memory": kv_host_memory, "max_num_batched_tokens": chunk}
    with open_llm(**TINY_POOL, **options, kernels=kernels) as llm:
        assert run(llm, prompts) == right
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.cache_stats.num_evicted_blocks > 0
        assert moved(llm).num_saved_blocks > 0
        assert moved(llm).num_loaded_blocks > 0
        assert run(llm, prompts) == right


def test_with_much_host_memory_the_second_time_hardly_computes_anything(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens]
) -> None:
    with open_llm(**TINY_POOL, kv_host_memory=LARGE) as llm:
        assert run(llm, prompts) == right
        loaded, before = moved(llm).num_loaded_blocks, computed(llm)
        assert run(llm, prompts[:4]) == right[:4]
        assert moved(llm).num_loaded_blocks > loaded
        assert computed(llm) - before <= 4 * 16, "less than a block of each prompt"


# ---- the disk


def test_a_later_engine_finds_what_an_earlier_one_computed(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path
) -> None:
    folder = str(tmp_path / "made" / "anew")
    with open_llm(kv_disk_path=folder) as llm:
        assert run(llm, prompts) == right
        assert moved(llm).num_loaded_files == 0
        assert computed(llm) == NUM_COMPUTED
    assert len(kv_files(Path(folder))) >= sum(length // 16 for length in LENGTHS), "closing wrote them"
    with open_llm(kv_disk_path=folder, kv_host_memory=LARGE) as llm:
        assert run(llm, prompts) == right
        assert 16 * moved(llm).num_loaded_files == sum(CACHED)
        assert computed(llm) == NUM_COMPUTED - sum(CACHED)
        assert run(llm, prompts) == right
        assert 16 * moved(llm).num_loaded_files == sum(CACHED), "now the pool has them"
    with open_llm(kv_disk_path=folder) as llm:  # with host memory for the files of one prompt
        for i, prompt in enumerate(prompts):
            (output,) = llm.generate([prompt], PARAMS[i], use_tqdm=False)
            assert [completion.token_ids for completion in output.outputs] == right[i]
            assert output.num_cached_tokens == CACHED[i]
        assert 16 * moved(llm).num_loaded_files == sum(CACHED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_host_memory": SMALL},
        {"kv_host_memory": 2 * SMALL, "preemption_mode": "swap"},
        {
            "kv_host_memory": 2 * SMALL,
            "preemption_mode": "swap",
            "async_scheduling": True,
            "scheduling_policy": "mixed",
        },
    ],
)
def test_a_tiny_pool_above_a_disk(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path, options: dict[str, Any]
) -> None:
    for is_second in (False, True):
        with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path), **options) as llm:
            assert run(llm, prompts) == right
            if is_second:
                assert computed(llm) < NUM_COMPUTED
            assert run(llm, prompts) == right
            assert kv_files(tmp_path), "written before the engine closes"
            assert llm.engine.scheduler.num_preemptions > 0
            assert moved(llm).num_loaded_files > 0
            assert is_second or moved(llm).num_written_files > 0
            assert moved(llm).num_loaded_blocks > 0 or "preemption_mode" not in options


def test_the_folder_holds_no_more_than_it_may(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path
) -> None:
    for kv_disk_bytes in (12 * BLOCK_BYTES, 5 * BLOCK_BYTES):
        with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path), kv_disk_bytes=kv_disk_bytes) as llm:
            assert run(llm, prompts) == right
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert files
        assert sum(file.stat().st_size for file in files) <= kv_disk_bytes


def test_a_limit_below_one_block_keeps_nothing(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path
) -> None:
    with open_llm(kv_disk_path=str(tmp_path), kv_disk_bytes=100) as llm:
        assert run(llm, prompts[:2]) == right[:2]
    assert not kv_files(tmp_path)


def test_engines_of_another_dtype_or_layout_have_files_of_their_own(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path
) -> None:
    with open_llm(kv_disk_path=str(tmp_path)) as llm:
        run(llm, prompts[:2])
    before = kv_files(tmp_path)
    for options in ({"dtype": "bfloat16"}, {"block_size": 8}, {"attention_backend": "torch"}):
        with open_llm(kv_disk_path=str(tmp_path), **options) as llm:
            run(llm, prompts[:2])
            assert moved(llm).num_loaded_files == 0
    assert set(before) < set(kv_files(tmp_path))
    with open_llm(kv_disk_path=str(tmp_path)) as llm:
        assert run(llm, prompts[:2]) == right[:2]
        assert moved(llm).num_loaded_files > 0


# ---- files that are not to be trusted


def flip_a_bit(file: Path, other: bytes) -> None:  # noqa: ARG001
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path, other: bytes) -> None:  # noqa: ARG001
    file.write_bytes(file.read_bytes()[:-1000])


def empty(file: Path, other: bytes) -> None:  # noqa: ARG001
    file.write_bytes(b"")


def put_other_tokens(file: Path, other: bytes) -> None:
    file.write_bytes(other)


def parts_of(file: Path) -> tuple[bytes, bytes]:
    """Header and K/V."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<I", content, len(MAGIC))
    start = len(MAGIC) + 4
    return content[start : start + length], content[start + length : -8]


def put_another_models(file: Path, other: bytes) -> None:  # noqa: ARG001
    header, payload = parts_of(file)
    write_kv_file(file, bytes(len(header)), payload)


def put_another_size(file: Path, other: bytes) -> None:  # noqa: ARG001
    header, payload = parts_of(file)
    write_kv_file(file, header, payload[:-64])


def spoil_all(folder: Path, spoil: Callable[[Path, bytes], None]) -> None:
    files = kv_files(folder)
    contents = [file.read_bytes() for file in files]
    for file, other in zip(files, contents[1:] + contents[:1], strict=True):
        spoil(file, other)


@pytest.mark.parametrize("spoil", [flip_a_bit, truncate, empty, put_other_tokens, put_another_models, put_another_size])
def test_a_bad_file_is_ignored_with_a_warning(
    open_llm: OpenLLM,
    prompts: Tokens,
    right: list[Tokens],
    tmp_path: Path,
    spoil: Callable[[Path, bytes], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_llm(kv_disk_path=str(tmp_path)) as llm:
        run(llm, prompts[:1])
    spoil_all(tmp_path, spoil)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="nanoengine"), open_llm(kv_disk_path=str(tmp_path)) as llm:
        for _ in range(2):
            assert run(llm, prompts[:1]) == right[:1]
        assert moved(llm).num_loaded_files == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(set(warnings)) == LENGTHS[0] // 16, "one of each file, once"
    assert all(warning.startswith("ignored: ") and str(tmp_path) in warning for warning in warnings)
    with open_llm(kv_disk_path=str(tmp_path)) as llm:
        assert run(llm, prompts[:1]) == right[:1]
        assert moved(llm).num_loaded_files > 0, "closing wrote a sound one"


def remove(file: Path, other: bytes) -> None:  # noqa: ARG001
    file.unlink()


@pytest.mark.parametrize("spoil", [truncate, remove])
def test_files_that_are_spoilt_while_the_engine_runs_are_misses(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path, spoil: Callable[[Path, bytes], None]
) -> None:
    with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path)) as llm:
        run(llm, prompts)
        spoil_all(tmp_path, spoil)
        for _ in range(2):
            assert run(llm, prompts[:1]) == right[:1], "no step fails for it"
        assert moved(llm).num_bad_files > 0


# ---- salts and resets


@pytest.mark.parametrize("on_disk", [False, True])
def test_only_requests_of_equal_salt_share_a_prefix(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path, on_disk: bool
) -> None:
    options = {"kv_disk_path": str(tmp_path)} if on_disk else {}
    with open_llm(**options) as llm:
        for salt in ("", "a", "b"):
            for is_second in (False, True):
                before = computed(llm)
                assert run(llm, prompts[:2], cache_salt=salt) == right[:2]
                num_new = computed(llm) - before
                assert (num_new < 32) if is_second else (num_new == sum(LENGTHS[:2])), salt
    if on_disk:
        with open_llm(**options) as llm:
            for salt, has_all_tokens in (("c", False), ("b", True), ("", True)):
                before = moved(llm).num_loaded_files
                assert run(llm, prompts[:2], cache_salt=salt) == right[:2]
                assert (moved(llm).num_loaded_files > before) == has_all_tokens


@pytest.mark.parametrize("salt", [5, None, b"a", "\ud800"])
def test_a_salt_that_is_no_text_is_refused_and_nothing_is_left(demo_llm: LLM, salt: Any) -> None:
    with pytest.raises(NanoEngineError, match="cache_salt"):
        demo_llm.generate("x", PARAMS[0], cache_salt=salt, use_tqdm=False)
    assert_idle(demo_llm)


def test_a_reset_empties_every_tier(open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path) -> None:
    with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path), kv_host_memory=SMALL) as llm:
        assert run(llm, prompts) == right
        assert kv_files(tmp_path)
        assert llm.reset_prefix_cache()
    assert not kv_files(tmp_path), "deleted beside the steps, or when the engine closes"
    with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path), kv_host_memory=SMALL) as llm:
        assert run(llm, prompts) == right
        loaded = moved(llm).num_loaded_blocks
        assert llm.reset_prefix_cache()
        fill_kv_with_nan(llm)
        before = computed(llm)
        assert run(llm, prompts[:1]) == right[:1]
        assert computed(llm) - before == LENGTHS[0]
        assert moved(llm).num_loaded_blocks == loaded
        assert run(llm, prompts) == right


def test_a_reset_is_refused_while_a_request_runs(
    open_llm: OpenLLM, prompts: Tokens, right: list[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(**TINY_POOL, kv_disk_path=str(tmp_path), kv_host_memory=SMALL) as llm:
        launch, answers = model_runner(llm).launch, []

        def resetting(plan: StepPlan) -> Any:
            answers.append(llm.reset_prefix_cache())
            return launch(plan)

        monkeypatch.setattr(model_runner(llm), "launch", resetting)
        assert run(llm, prompts) == right
        monkeypatch.undo()
        assert answers
        assert not any(answers)


# ---- steps that fail while blocks are on their way


class Broken(Exception):
    """What the sabotaged part of the runner raises."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("error", "after_the_copies", "disk"),
    [
        (Broken("here"), False, True),
        (Broken("here"), True, False),
        (KeyboardInterrupt(), False, False),
        (KeyboardInterrupt(), True, True),
    ],
)
def test_a_step_that_fails_with_copies_pending_leaves_the_engine_right(
    open_llm: OpenLLM,
    prompts: Tokens,
    right: list[Tokens],
    tmp_path: Path,
    error: BaseException,
    after_the_copies: bool,
    disk: bool,
    overlap: bool,
) -> None:
    options: dict[str, Any] = {"kv_disk_path": str(tmp_path)} if disk else {}
    options["async_scheduling"] = overlap
    with open_llm(**TINY_POOL, preemption_mode="swap", kv_host_memory=SMALL, **options) as llm:
        (copier,) = [part for part in model_runner(llm).parts if isinstance(part, BlockCopier)]
        begin = copier.begin
        for nth in (1, 3):
            countdown = nth

            def failing(plan: StepPlan) -> None:
                nonlocal countdown
                has_copies = bool(plan.extras[NAME].copies)
                countdown -= has_copies
                strikes = has_copies and countdown == 0
                if after_the_copies or not strikes:
                    begin(plan)
                if strikes:
                    raise error

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(copier, "begin", failing)
                expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StepFailed
                with pytest.raises(expected):
                    llm.generate(prompts, PARAMS, use_tqdm=False)
            assert_idle(llm)
            assert run(llm, prompts) == right
