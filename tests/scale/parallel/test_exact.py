"""A group computes what one device does, to the bit: logits at every position, and the K/V of every head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.models import capability as models
from nanoengine.models.layers.mixer import Mixer
from tests.e2e.drawn_models import WITHOUT, in_q4_k
from tests.models.families import SHAPES, WITH_STATES, family_checkpoint
from tests.models.quantization.packed_models import awq_form, mxfp4_folder, pack_folder
from tests.scale.parallel.groups import by_all, open_group
from tests.support import backend_of, fill_kv_with_nan, forced_logits, model_runner, threads

REASON = unsupported_reason(torch.device("cpu"), torch.bfloat16)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

TOKENS = [(37 * i + i * i) % 256 for i in range(45)]
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "Q4_K": {"dtype": "bfloat16", "quantization": "int8"},
    "AWQ": {"dtype": "float32"},
}
SHARED_OTHERWISE = (
    "Llama, untied, odd heads",
    "Llama, no groups, odd sizes",
    "Llama, all biases",
    "Qwen2, tied, 7 heads",
    "OLMo2, biases, no groups",
    "Qwen3-MoE, some layers dense",
    "gpt-oss, full layers, no biases",
    "Llama 4, dense between, biases, llama3",
    "Llama 4, full layers, no norms, no experts",
)
"""Shapes whose heads, sizes, biases or experts are divided in another way than those of the first shape of their family. Windows
and rotations are not divided: every rank has them all."""
REFUSED = [own for own in SHAPES if own.startswith("Gemma4")]
"""Whose attention ranks do not share."""
FIRST = {SHAPES[own][0]: own for own in reversed(SHAPES) if own not in (*WITHOUT, *WITH_STATES, *REFUSED)}
DIFFERENT = [own for own in SHAPES if own in (*FIRST.values(), *SHARED_OTHERWISE)]
CASES = [(shape, 2 + i % 3, list(WAYS)[i % 4]) for i, shape in enumerate(DIFFERENT)]
CASES += [("SmolLM2's shape", 3, way) for way in WAYS]
CASES = list(dict.fromkeys(CASES))
STATES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("LFM2", 2, "bfloat16", {}),
    ("LFM2", 4, "Q4_K", {}),
    ("LFM2, biases, four taps, adjusted", 3, "int8", {}),
    ("LFM2-MoE", 2, "bfloat16", {}),
    ("Qwen3.5", 2, "float32", {}),
    ("Qwen3.5", 3, "Q4_K", {}),  # two key heads: some ranks have the same one
    ("Qwen3.5", 4, "int8", {}),
    ("Qwen3.5, odd sizes", 2, "bfloat16", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    ("Qwen3-Next", 2, "int8", {}),
    ("Qwen3-Next", 3, "bfloat16", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    ("Qwen3.5-MoE", 3, "bfloat16", {"linear_num_key_heads": 1}),
    ("Granite 4", 2, "Q4_K", {}),
    ("Granite 4", 3, "int8", {"mamba_n_heads": 4}),
    ("Granite 4, dense, rotated", 2, "bfloat16", {"mamba_n_heads": 4}),  # each rank has a whole group
    ("Granite 4, dense, rotated", 3, "float32", {"mamba_n_heads": 4}),
    ("Granite 4, dense, rotated", 4, "int8", {"mamba_n_heads": 8, "mamba_n_groups": 4}),
    ("Falcon H1", 3, "Q4_K", {}),
    ("Falcon H1, without norms, untied", 2, "int8", {}),
    ("Nemotron-H", 2, "bfloat16", {}),
]


@contextmanager
def quantized(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if way == "Q4_K":
            patch.setattr(models, "quantizer", lambda *_: in_q4_k)
        yield


def check(folder: Path, size: int, **options: Any) -> None:
    given = {"num_kv_blocks": 60, "num_threads": 1, "max_model_len": 96, "kernels": "native"} | options

    def compute(llm: LLM) -> torch.Tensor:
        return forced_logits(llm, TOKENS, num_prompt_tokens=38, chunk=20)

    with ExitStack() as stack:
        alone = stack.enter_context(LLM(str(folder), device="cpu", use_tqdm=False, **given))
        fill_kv_with_nan(alone)
        right = compute(alone)
        assert right.std() > 0.1
        ranks = stack.enter_context(open_group(size, folder, **given))
        for logits in by_all(ranks, compute):
            assert torch.equal(logits, right)
        seen: list[set[int]] = [set() for _ in ranks]
        for rank, llm in enumerate(ranks):
            group = llm.built.capabilities["parallel"].group
            heads = group.partition.kv_heads[rank]
            seen[rank] = set(heads)
            mixers = {mixer.state_index: mixer for mixer in model_runner(llm).model.mixers.values()}
            attending = alone.built.models.model_config.attention_layers
            layers = zip(model_runner(llm).kv_cache.layers, model_runner(alone).kv_cache.layers, strict=True)
            for place, (own, whole) in enumerate(layers):
                if place not in mixers and place not in attending:
                    continue
                if place in mixers:
                    parts = parts_of_states(mixers[place], whole)
                else:
                    parts = [of_all[:, :, heads.start : heads.stop] for of_all in whole]
                for of_rank, part in zip(own, parts, strict=True):
                    assert torch.equal(bits(part), bits(of_rank))
        assert len(set.union(*seen)) == alone.built.models.model_config.num_kv_heads


def parts_of_states(mixer: Mixer, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a rank's layer has of the states of one device, as far as both keep the same slots."""
    convolved, recurrent = states
    heads = mixer.partition.local["heads"]
    return [mixer.partition.pick(convolved, *mixer.convolved), recurrent[:, heads.start : heads.stop]]


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def check_shape(folder: Path, shape: str, size: int, way: str, **overrides: Any) -> None:
    overrides = {"head_dim": 32} | overrides
    if way == "Q4_K" and 256 % SHAPES[shape][1].get("num_attention_heads", 4) == 0:
        overrides |= {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256
    if way == "AWQ":
        overrides |= {"hidden_size": 144, "intermediate_size": 80}
    size = min(size, SHAPES[shape][1].get("num_attention_heads", 4))
    model = family_checkpoint(folder / "model", shape, **overrides)
    if way == "AWQ":
        model = pack_folder(model, folder / "packed", awq_form())
    with threads(1), quantized(way):
        check(model, size, **WAYS[way])


@pytest.mark.parametrize(("shape", "size", "way"), CASES, ids=lambda own: str(own))
def test_logits_and_kv_are_those_of_one_device(tmp_path: Path, shape: str, size: int, way: str) -> None:
    check_shape(tmp_path, shape, size, way)


@pytest.mark.parametrize(("shape", "size", "way", "overrides"), STATES, ids=lambda own: str(own))
def test_states_are_those_of_one_device(
    tmp_path: Path, shape: str, size: int, way: str, overrides: dict[str, Any]
) -> None:
    check_shape(tmp_path, shape, size, way, **overrides)


def test_experts_that_stay_in_4_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    folder = family_checkpoint(tmp_path / "model", "gpt-oss", head_dim=32, **sizes)
    with threads(1):
        check(mxfp4_folder(folder, tmp_path / "packed"), 3, dtype="bfloat16")


@pytest.mark.parametrize(("shape", "size"), [("Mistral, no window", 2), ("OLMo2", 3)])
def test_heads_that_torch_attends_to(tmp_path: Path, shape: str, size: int) -> None:
    """Of a size that the native backend does not compute; torch promises no bits."""
    folder = family_checkpoint(tmp_path, shape, head_dim=20)
    given = {"num_kv_blocks": 40, "num_threads": 1, "max_model_len": 96, "dtype": "float32"}

    def compute(llm: LLM) -> torch.Tensor:
        return forced_logits(llm, TOKENS, num_prompt_tokens=38, chunk=20)

    with threads(1), ExitStack() as stack:
        right = compute(stack.enter_context(LLM(str(folder), device="cpu", use_tqdm=False, **given)))
        ranks = stack.enter_context(open_group(size, folder, **given))
        assert backend_of(ranks[0]).name == "torch"
        for logits in by_all(ranks, compute):
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
