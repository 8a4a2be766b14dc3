"""TransformersDecoder: the calls of `DenseDecoder`, computed by a model of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.kv_cache import KVCache
from nanoengine.errors import UnsupportedModel
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.layers.attention import Attention as PagedAttention
from nanoengine.models.layers.factory import Factory
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.transformers_backend.checks import (
    TEXT_LENGTH,
    TOLERANCES,
    check_tokens_alone,
    count_positions,
    drawn_ids,
    first_positions,
    logits_by_transformers,
    one_prompt,
)
from nanoengine.models.transformers_backend.fusion import RotaryTables, fuse_rotations, fused_attention, fused_mlp
from nanoengine.models.transformers_backend.halves import Halves
from nanoengine.models.transformers_backend.interface import STEP, AttentionCall, values_alone
from nanoengine.models.transformers_backend.module_calls import recorded
from nanoengine.models.transformers_backend.modules import LinearGroup
from nanoengine.models.transformers_backend.probe import attention_calls

logger = logging.getLogger("nanoengine")


class TransformersDecoder:
    """A decoder of transformers with the attention, products and norms of this engine.

    Args:
        model: with its weights, as `loading.load` returns it.
        groups: of its linear layers.
        calls: of attention, from the probe.
        config: the sizes of the KV cache, from the largest call.

    Raises:
        UnsupportedModel: its results differ from the probe or from transformers' attention.
    """

    layers: Sequence[Any] = ()
    mixers: Mapping[int, Any] = {}

    def __init__(
        self,
        model: Any,
        groups: Sequence[LinearGroup],
        calls: Sequence[AttentionCall],
        config: ModelConfig,
        factory: Factory,
        backend: AttentionBackend,
    ):
        self.config, self.backend, self.factory, self.calls, self.groups = config, backend, factory, list(calls), groups
        self.kernels, self.matrices, self.model = factory.kernels, factory.matrices, model
        self.specs = [call.spec_with(config.layer(number).window) for number, call in enumerate(calls)]
        self.halves = Halves(model)
        self.attention = self.halves.attention
        self.rotations: list[RotaryTables] = []
        with torch.no_grad():
            positions = torch.tensor([7, 0, 3, 4, 9], dtype=torch.int64, device=factory.device)
            ids = drawn_ids(len(positions), config.vocab_size, factory.device)
            count_positions(self.halves, ids)
            check_tokens_alone(self.halves, ids, positions, self.calls)
            text = drawn_ids(TEXT_LENGTH, config.vocab_size, factory.device)
            theirs = logits_by_transformers(self.halves, text)
            rounded = logits_by_transformers(self.halves, text, torch.finfo(factory.dtype).eps)
            self._fuse(ids, positions)
            self.prepare(TEXT_LENGTH)
            self._compare(text, theirs, float((rounded - theirs).abs().max()))
        self.attention.use(STEP)

    def _fuse(self, ids: Tensor, positions: Tensor) -> None:
        with recorded(self.model) as calls:
            attention_calls(self.halves, ids, positions)
        self.rotations = fuse_rotations(calls, positions + self.halves.first_position)
        heads: list[tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]] = []

        def compute(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
            heads.append((module, (query, key, value)))
            return values_alone(query, value)

        self.attention.compute = compute
        with recorded(self.model) as calls:
            self.halves.layers(ids, positions)
        attending = [module for module, _ in heads]
        for call in calls:
            fused: Any = None
            if call.module not in attending:
                fused = fused_mlp(call)
            elif attending.count(call.module) == 1 and self._fits(number := attending.index(call.module)):
                paged = partial(PagedAttention, number, self.config, self.specs[number], self.backend)
                fused = fused_attention(call, heads[number][1], self.attention, paged)
            if fused is not None:
                call.module.forward = fused

    @property
    def linear_rows(self) -> dict[str, tuple[int, int]]:
        """Linear layers by name: the index of the matrix in `matrices`, and the first row there."""
        names = {module: name for name, module in self.model.named_modules()}
        numbers = {id(matrix): number for number, matrix in enumerate(self.matrices)}
        return {
            names[member]: (numbers[id(group.weight)], first)
            for group in self.groups
            for member, first in zip(group.members, accumulate(group.sizes, initial=0), strict=False)
        }

    def _fits(self, number: int) -> bool:
        """Whether the heads of a call have the sizes of the KV cache, and there are no sinks."""
        call, config = self.calls[number], self.config
        sizes = call.num_kv_heads, call.key_dim, call.value_dim
        return sizes == (config.num_kv_heads, config.head_dim, config.head_dim) and not call.spec.sinks

    def _compare(self, text: Tensor, theirs: Tensor, noise: float) -> None:
        """Compare log probabilities of a text with those of transformers' attention on the same weights, with unquantized K/V.

        Raises:
            UnsupportedModel: they differ by more than `noise`, the effect of rounding the embeddings.
        """
        is_quantized, self.backend.quantized = self.backend.quantized, False
        num_blocks = -(-len(text) // self.backend.block_size)
        shape = self.backend.kv_shape(1, self.config.num_kv_heads, self.config.head_dim)[1:]
        cache = KVCache(num_blocks, [list(range(len(self.calls)))], shape, self.factory.dtype, self.factory.device)
        metadata = one_prompt(len(text), len(self.calls), cache, self.backend.block_size)
        self.attention.use(STEP)
        hidden = self.forward(text, first_positions(text), metadata)
        self.backend.quantized = is_quantized
        distance = float((self.compute_logits(hidden).log_softmax(-1) - theirs).abs().max())
        name = self.halves.name
        logger.debug("%s: off by %.2g from transformers' log probabilities (noise %.2g)", name, distance, noise)
        if not distance < (allowed := max(TOLERANCES[self.factory.dtype], 4 * noise)):
            raise UnsupportedModel(
                f"{name}: log probabilities of {len(text)} tokens are off by {distance:.2g} from those by "
                f"transformers' own attention, and at most {allowed:.2g} is noise"
            )

    def prepare(self, max_len: int) -> None:
        """Prepare the rotations of positions below `max_len`."""
        for rotation in self.rotations:
            rotation.prepare(max_len + self.halves.first_position)
        self.attention.compute = self._attend

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """[num_tokens] ids and positions, and the metadata of each layer -> [num_tokens, hidden_size]."""
        self.attention.metadata, self.attention.layer = metadata, 0
        return self.halves.layers(input_ids, positions)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any, more: Mapping[str, Any]
    ) -> Tensor:
        number, metadata, width = self.attention.layer, self.attention.next_layer(), value.shape[-1]
        q, k, v = (_widened(heads[0].transpose(0, 1), self.config.head_dim) for heads in (query, key, value))
        if k.shape[1] < self.config.num_kv_heads:
            k, v = (heads.repeat_interleave(self.config.num_kv_heads // heads.shape[1], 1) for heads in (k, v))
        kv, sinks = metadata.kv_cache[number], more.get("s_aux")
        self.backend.write_kv(k, v, kv, metadata.slot_mapping)
        sinks = None if sinks is None else sinks.float()
        return self.backend.attend(q, kv, metadata, self.specs[number], sinks)[None, ..., :width].contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32."""
        return self.halves.head(hidden).float()


def _widened(heads: Tensor, size: int) -> Tensor:
    """Heads padded with zeros, which do not change scores."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))
