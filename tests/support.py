"""What several tests share: tiny checkpoints, the reference (Hugging Face transformers), and the engine under a magnifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nanoengine import LLM, SamplingParams
from nanoengine.core.inputs import InputBatch, pack
from nanoengine.core.layers import Angles
from nanoengine.core.messages import RowSampling, Run, Started, StepPlan
from nanoengine.core.model_runner import ModelRunner
from nanoengine.features.kv_groups.state_keeper import StateKeeper
from nanoengine.features.kv_offload.block_copier import BlockCopier
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.operations import WeightRows
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.models.decoder import Decoder
from nanoengine.models.layers.rotary import RotaryEmbedding
from nanoengine.models.layers.slots import Unused
from nanoengine.models.model_config import LayerConfig, ModelConfig, RopeConfig

if TYPE_CHECKING:  # children that need no reference start without it
    from transformers import PreTrainedTokenizerFast

TINY = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
    "bos_token_id": 256,
}

QWEN3_06B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    dtype="bfloat16",
    layers=(LayerConfig(rope=RopeConfig(theta=1e6, rotary_dim=128)),),
    qk_norm="head",
)
TOY = replace(
    QWEN3_06B,
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(LayerConfig(rope=RopeConfig(theta=1e6, rotary_dim=4)),),
)


def tiny_checkpoint(folder: Path, seed: int = 0, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A random Qwen3 checkpoint with a byte-level tokenizer; weights large enough that every token has its own logits."""
    torch.manual_seed(seed)
    options = TINY | overrides
    rope_theta = options.pop("rope_theta")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**options, rope_parameters={"rope_type": "default", "rope_theta": rope_theta}, dtype="float32")
    return save_random(Qwen3ForCausalLM(config).eval(), folder, max_shard_size)


OFFSET_NORMS = ("Gemma2", "Gemma3", "Qwen3_5", "Qwen3Next")
"""Families whose norms are 1 + the weight."""


def save_random(model: Any, folder: Path, max_shard_size: str = "5GB") -> Path:
    """A model of transformers with weights large enough that every token has its own logits, and a byte-level tokenizer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                is_offset = type(model).__name__.startswith(OFFSET_NORMS) and "linear_attn" not in name
                parameter.uniform_(0.5, 1.5).sub_(float(is_offset))
                if type(model).__name__.startswith("Gemma4") and "q_norm" in name:
                    parameter.mul_(0.25)  # its scores are not divided by anything
            elif "bias" in name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4: no parameter, and in its files
                buffer.uniform_(0.5, 1.0)
            if name.endswith("_bias"):  # of a router
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    """Where the tensors of a checkpoint go: with kernels in torch, into tensors."""
    places: dict[str, Any] = {**model.checkpoint_tensors()}
    places = {name: getattr(place, "slot", place) for name, place in places.items()}  # whatever it is wrapped in
    places = {name: place for name, place in places.items() if not isinstance(place, Unused)}
    return {name: _tensor_of(place) if isinstance(place, WeightRows) else place for name, place in places.items()}


def _tensor_of(rows: WeightRows) -> torch.Tensor:
    assert isinstance(rows.weight, RowMajor)
    return rows.weight.tensor[rows.first : rows.first + rows.shape[0]]


def angles_at(positions: torch.Tensor, head_dim: int, theta: float) -> Angles:
    """By which heads are rotated at these positions."""
    rotary = RotaryEmbedding(head_dim, RopeConfig(theta=theta, rotary_dim=head_dim), positions.device)
    rotary.prepare(int(positions.max()) + 1 if len(positions) else 0)
    return rotary(positions)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end of text: every text has ids, every list of ids has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def reference_model(folder: Path) -> Any:
    """The same weights in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_greedy(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of prompts of one length by transformers, end-of-text tokens treated like others."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return out[:, ids.shape[1] :].tolist()


@torch.inference_mode()
def reference_choices(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> list[int]:
    """The likeliest token at each place of a continuation by transformers: it is the greedy one if it is equal to this.

    All places are computed at once, where `reference_greedy` takes a step for each.
    """
    ids = torch.tensor([[*prompt, *continuation[:-1]]])
    return model(ids, logits_to_keep=len(continuation), use_cache=False).logits[0].argmax(-1).tolist()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]: what transformers predicts after each token."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def num_weights(model: Any) -> int:
    """Numbers in all tensors that a model takes from a checkpoint."""
    places = model.checkpoint_tensors().values()
    return sum(place.shape.numel() for place in places if not isinstance(place, Unused))


def num_weights_of_transformers(model: Any) -> int:
    """The same of a model of transformers: biases that routers choose by are buffers there."""
    stored = model.state_dict()
    return model.num_parameters() + sum(own.numel() for name, own in model.named_buffers() if name in stored)


def model_runner(llm: LLM) -> ModelRunner:
    """What computes the steps, below what holds Ctrl-C back."""
    runner: Any = llm.engine.executor
    while not isinstance(runner, ModelRunner):
        runner = runner.executor
    return runner


def backend_of(llm: LLM) -> AttentionBackend:
    layers: Any = model_runner(llm).model.layers
    parts = (part for layer in layers for part in getattr(layer.self_attn, "parts", (layer.self_attn,)))
    backend = next(part for part in parts if hasattr(part, "attention")).attention.backend
    assert isinstance(backend, AttentionBackend)
    return backend


def fill_kv_with_nan(llm: LLM) -> None:
    """Whoever reads a slot that nobody wrote, will show. Bytes that hold K/V in 8 bits and their scales are NaN if all are -1."""
    fill_with_nan(model_runner(llm))


def fill_with_nan(runner: ModelRunner) -> None:
    for place in runner.kv_cache.pool_layers:
        for tensor in place:
            tensor.fill_(-1 if tensor.dtype is torch.int8 else float("nan"))
    for part in runner.parts:
        if isinstance(part, StateKeeper):
            part.pool.slots.fill_(float("nan"))
        if isinstance(part, BlockCopier):
            part.host.fill_(255)


@torch.inference_mode()
def forced_logits(
    llm: LLM, token_ids: Sequence[int], num_prompt_tokens: int, chunk: int, every: int = 1
) -> torch.Tensor:
    """[num_tokens / every, vocab_size]: what the engine predicts after each token of a given text, or after each `every`-th.

    The first `num_prompt_tokens` are prefilled in chunks, the others decoded one by one; the block tables are shuffled ones.
    """
    runner = model_runner(llm)
    num_blocks = -(-len(token_ids) // runner.block_size)
    order = [(7 * i + 3) % num_blocks for i in range(num_blocks)] if num_blocks % 7 else list(range(num_blocks))[::-1]
    # Groups of layers have blocks of their own.
    tables = [[1 + group * num_blocks + i for i in order] for group in range(max(runner.kv_cache.groups) + 1)]
    how = RowSampling(SamplingParams(), seed=0, num_prompt_tokens=num_prompt_tokens)
    logits = []
    start = 0
    while start < len(token_ids):
        if start < num_prompt_tokens:
            count = min(chunk, num_prompt_tokens - start)
            begun = [] if start else [Started(0, list(token_ids[:num_prompt_tokens]), tables, how)]
            plan = StepPlan(started=begun, runs=[Run(0, start, count, False)])
        else:  # begun anew, since nobody samples what was given
            count = 1
            begun = [Started(0, list(token_ids[: start + 1]), tables, how)]
            plan = StepPlan(
                started=begun, decode_rows=np.array([0], np.int32), decode_starts=np.array([start], np.int32)
            )
        inputs = input_batch(runner, plan)
        for part in runner.parts if start == 0 else ():
            if isinstance(part, StateKeeper):
                part.begin(plan)
        hidden = runner.model.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        logits.append(runner.model.compute_logits(hidden[-start % every :: every]))
        start += count
    return torch.cat(logits)


def input_batch(runner: ModelRunner, plan: StepPlan) -> InputBatch:
    """The tensors of a plan, as a step has them."""
    runner.rows.apply(plan)
    packed = pack(plan, runner.rows)
    runner.send(packed)
    return runner.batch(packed)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch and for the native kernels."""
    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    if unsupported_reason(torch.device("cpu"), torch.float32) is None:
        c_functions().set_num_threads(count)
