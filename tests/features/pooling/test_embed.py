"""`LLM.embed` against transformers, and against itself in whatever way a prompt is computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoTokenizer

from nanoengine import LLM, PoolingParams, SamplingParams
from nanoengine.core.messages import StepPlan
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams, NotFiniteLogits, StepFailed
from nanoengine.features.pooling.outputs import EmbeddingOutput
from nanoengine.kernels.native.support import unsupported_reason
from tests.e2e.small_engine import Broken, open_llm, raise_at, sabotage
from tests.models.families import family_checkpoint
from tests.models.gguf.written import write_gguf
from tests.support import model_runner, tiny_checkpoint

Vector = np.ndarray[Any, Any]

SHAPES = ["Llama, untied, odd heads", "Granite", "Mistral, a window", "Qwen3-MoE"]
PROMPTS = [[7 * i % 250 for i in range(n)] for n in (1, 16, 75)]
WAYS = [PoolingParams(pooling=own, normalize=normalize) for own in ("last", "mean") for normalize in (False, True)]
IS_EXACT = unsupported_reason(torch.device("cpu"), torch.float32) is None
"""The native kernels give every token the same bits in every batch; torch's do so nearly."""


@torch.inference_mode()
def reference(folder: Path, prompts: list[list[int]], params: PoolingParams) -> list[Vector]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    pooled = [own[-1] if params.pooling == "last" else own.mean(0) for own in states]
    pooled = [own[: params.dimensions] for own in pooled]
    return [(torch.nn.functional.normalize(own, dim=0) if params.normalize else own).numpy() for own in pooled]


def embed(llm: LLM, prompts: Any, params: Any = None) -> list[Vector]:
    return [own.embedding for own in llm.embed(prompts, params, use_tqdm=False)]


def equal(one: Vector, other: Vector) -> bool:
    return one.tobytes() == other.tobytes() if IS_EXACT else np.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_transformers_says(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape)
    with open_llm(folder, max_model_len=100, max_num_batched_tokens=32) as llm:
        for params in (*WAYS, PoolingParams(pooling="last", normalize=True, dimensions=7)):
            found = embed(llm, PROMPTS, params)
            for own, expected in zip(found, reference(folder, PROMPTS, params), strict=True):
                assert own.dtype == np.float32
                assert own.shape == expected.shape
                assert np.abs(own - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=32)


COMMON = [(3 * i + 1) % 200 for i in range(90)]


def test_a_prompt_in_chunks_has_the_bits_of_a_whole_one(folder: Path) -> None:
    """In all other ways of running: tests/e2e/one_number.py."""
    options, found = {"max_model_len": 120, "enable_prefix_caching": False}, []
    for budget in (13, 8192):
        with open_llm(folder, max_num_batched_tokens=budget, **options) as llm:
            found.append([embed(llm, [COMMON[:40]], params)[0] for params in WAYS])
    assert all(map(equal, *found))


def test_a_mean_is_of_all_tokens_though_the_cache_has_some(folder: Path) -> None:
    prompt = COMMON[:70]
    with open_llm(folder, max_model_len=100) as llm:
        first, again = (llm.embed([prompt], PoolingParams(pooling="mean"), use_tqdm=False)[0] for _ in range(2))
        last = llm.embed([prompt], use_tqdm=False)[0]
    assert first.num_cached_tokens == again.num_cached_tokens == 0
    assert first.embedding.tobytes() == again.embedding.tobytes()
    assert last.num_cached_tokens == 64


def test_what_comes_back(folder: Path) -> None:
    with open_llm(folder) as llm:
        [one] = llm.embed("hello", use_tqdm=False)
        several = llm.embed([[1, 2, 3], "hello"], [PoolingParams(dimensions=4), PoolingParams()], use_tqdm=False)
        assert llm.embed([], use_tqdm=False) == []
    assert isinstance(one, EmbeddingOutput)
    assert (one.prompt, one.prompt_token_ids) == ("hello", llm.engine.encode("hello"))
    assert one.embedding.shape == (48,)
    assert abs(float(np.square(one.embedding).sum()) - 1) < 1e-6
    assert several[0].embedding.shape == (4,)
    assert several[1].embedding.tobytes() == one.embedding.tobytes()
    assert one.outputs.embedding is one.embedding


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("a", PoolingParams(dimensions=49), InvalidSamplingParams, "dimensions is 49, but the embeddings of this model have 48"),
        ("a", SamplingParams(), InvalidSamplingParams, "params must be PoolingParams"),
        ("", None, InvalidPrompt, "the prompt is empty"),
        ([1] * 64, None, InvalidPrompt, "context length is 64"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_embedded(folder: Path, prompt: Any, params: Any, error: type[Exception], words: str) -> None:
    with open_llm(folder) as llm, pytest.raises(error, match=words):
        llm.embed([prompt], params)


def test_a_model_of_another_kind_wants_to_be_told_how(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    with open_llm(tmp_path) as llm:
        with pytest.raises(InvalidSamplingParams, match="set pooling to last or mean"):
            llm.embed("a")
        assert embed(llm, "a", PoolingParams(pooling="mean"))[0].shape == (48,)
    (tmp_path / "1_Pooling/config.json").write_text(
        '{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false}'
    )
    with open_llm(tmp_path) as llm:
        [own] = embed(llm, "abc")
        assert own.tobytes() == embed(llm, "abc", PoolingParams(pooling="mean", normalize=False))[0].tobytes()
    with open_llm(tmp_path, pooling="last") as llm:
        assert embed(llm, "abc")[0].tobytes() != own.tobytes()


@pytest.mark.parametrize(("shape", "shard"), [("Llama, untied, odd heads", "5GB"), ("Qwen3, yarn", "20KB")])
def test_a_model_without_a_head_is_the_same(tmp_path: Path, shape: str, shard: str) -> None:
    """As Qwen3-Embedding is stored: names of tensors do not begin with "model.", and there is no head. The first of many files
    may hold nothing but an embedding, whose name tells nothing.
    """
    whole = family_checkpoint(tmp_path / "whole", shape)
    bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModel.from_pretrained(whole, dtype=torch.float32).save_pretrained(bare, max_shard_size=shard)
    names = [name for file in sorted(bare.glob("*.safetensors")) for name in load_file(file)]
    assert "lm_head.weight" not in names
    assert shard == "5GB" or list(load_file(min(bare.glob("*.safetensors")))) == ["embed_tokens.weight"]
    found = []
    for folder in (whole, bare):
        with open_llm(folder) as llm:
            found.append(embed(llm, PROMPTS[:2]))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*found, strict=True))


def test_a_gguf_file_says_how(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "folder", "Qwen3, yarn")
    file = write_gguf(folder, tmp_path / "model.gguf", pooling_type=1)
    with open_llm(file, tokenizer=str(folder)) as llm:
        kinds = [None, *(PoolingParams(pooling=kind, normalize=True) for kind in ("mean", "last"))]
        own, mean, last = (embed(llm, PROMPTS[1], params)[0].tobytes() for params in kinds)
    assert own == mean != last


def test_a_tokenizer_adds_what_the_model_wants_at_the_end(tmp_path: Path) -> None:
    """As that of Qwen3-Embedding: the state of the end of text is the embedding."""
    folder = family_checkpoint(tmp_path, "Qwen3, yarn")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    special = [(end, tokenizer.token_to_id(end))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = AutoTokenizer.from_pretrained(folder)("a stack")["input_ids"]
    assert ids[-1] == special[0][1]
    with open_llm(folder) as llm:
        [found] = llm.embed("a stack", use_tqdm=False)
    assert found.prompt_token_ids == ids
    [expected] = reference(folder, [ids], PoolingParams(pooling="last", normalize=True))
    assert np.abs(found.embedding - expected).max() < 1e-4


def test_a_step_that_fails_spoils_no_mean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before the failure were added up already: the next request in that row begins anew."""
    mean = PoolingParams(pooling="mean")
    with open_llm(folder, max_num_batched_tokens=16, max_num_seqs=1, enable_prefix_caching=False) as llm:
        [expected] = embed(llm, [COMMON[5:45]], mean)
        with monkeypatch.context() as patch:
            sabotage(llm, patch, raise_at(2, Broken("at the second chunk")))
            with pytest.raises(StepFailed):
                llm.embed([COMMON[:40]], mean, use_tqdm=False)
        assert equal(embed(llm, [COMMON[5:45]], mean)[0], expected)


def test_no_step_that_is_pooled_is_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording has logits and no hidden states."""
    plans: list[StepPlan] = []
    with open_llm(folder) as llm:
        monkeypatch.setattr(model_runner(llm), "recorder", SimpleNamespace(logits=plans.append))
        embed(llm, "abc")
        assert not plans
        llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)
        assert plans


def test_no_number_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder) as llm:
        model = model_runner(llm).model
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *args: forward(*args) * float("nan"))
        with pytest.raises(StepFailed) as found:
            llm.embed("a", use_tqdm=False)
        assert isinstance(found.value.__cause__, NotFiniteLogits)
