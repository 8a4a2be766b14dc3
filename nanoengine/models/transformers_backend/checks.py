"""Checks at start with the weights: the model matches its probe, and mixes tokens in attention only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.kv_cache import KVCache
from nanoengine.errors import UnsupportedModel
from nanoengine.models.transformers_backend.halves import Halves
from nanoengine.models.transformers_backend.interface import AttentionCall
from nanoengine.models.transformers_backend.probe import attention_calls

TEXT_LENGTH = 40
"""Tokens whose log probabilities are compared with those of transformers' attention."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Tolerances of log probabilities, and of hidden states where each token attends to itself, by dtype."""


def drawn_ids(count: int, vocab_size: int, device: torch.device) -> Tensor:
    """[count] int64, the same every time."""
    generator, most = torch.Generator("cpu").manual_seed(count), min(vocab_size, 2**15)
    return torch.randint(0, most, (count,), generator=generator, dtype=torch.int64, device="cpu").to(device)


def first_positions(ids: Tensor) -> Tensor:
    """[num_tokens] int64: the positions of a text from its beginning."""
    return torch.arange(len(ids), dtype=torch.int64, device=ids.device)


def count_positions(halves: Halves, ids: Tensor) -> None:
    """Set `halves.first_position` to the position of a first token when the model counts positions itself.

    Raises:
        UnsupportedModel: the model counts positions in another way.
    """
    _, wanted = attention_calls(halves, ids, None)
    for halves.first_position in range(3):
        _, hidden = attention_calls(halves, ids, first_positions(ids))
        if _distance(hidden, wanted) < TOLERANCES[hidden.dtype]:
            return
    raise UnsupportedModel(f"{halves.name} does not count positions one by one, as it has to")


def check_tokens_alone(halves: Halves, ids: Tensor, positions: Tensor, probed: list[AttentionCall]) -> None:
    """Check that a token has the same hidden state beside others and alone, if each attends to itself only.

    Raises:
        UnsupportedModel: the model mixes tokens outside of attention, or its calls of attention differ from the probe.
    """
    calls, batched = attention_calls(halves, ids, positions)
    if calls != probed:
        raise UnsupportedModel(f"{halves.name} calls attention otherwise with its weights than without")
    pairs = zip(ids.split(1), positions.split(1), strict=True)
    alone = torch.cat([attention_calls(halves, *pair)[1] for pair in pairs])
    if not (distance := _distance(alone, batched)) < TOLERANCES[batched.dtype]:
        raise UnsupportedModel(
            f"{halves.name} mixes tokens outside of its attention, as recurrent states and convolutions do: a token beside "
            f"others is off by {distance:.2g}"
        )


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_by_transformers(halves: Halves, ids: Tensor, rounding: float = 0.0) -> Tensor:
    """Log probabilities of a text with transformers' attention: [num_tokens, vocab_size] float32.

    Args:
        rounding: relative noise of the embeddings.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def rounded(*called: Any) -> Tensor:
        output: Tensor = called[-1]
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
        return output * (1 + rounding * noise.to(output))

    halves.attention.use("eager")
    hook = halves.model.get_input_embeddings().register_forward_hook(rounded)
    logits = halves.head(halves.layers(ids, first_positions(ids)))
    hook.remove()
    return logits.float().log_softmax(-1)


def one_prompt(num_tokens: int, num_layers: int, cache: KVCache, block_size: int) -> list[AttentionMetadata]:
    """The metadata of each layer in a step of one prompt, in the blocks from 1 on."""
    device, num_blocks = cache.layers[0][0].device, -(-num_tokens // block_size)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        query_lens_list=[num_tokens],
        seq_lens_list=[num_tokens],
        kv_cache=cache.layers,
        slot_mapping=torch.arange(block_size, block_size + num_tokens, dtype=torch.int64, device=device),
        num_decodes=0,
    )
    return [metadata] * num_layers
