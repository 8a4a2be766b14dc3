"""TransformersDecoder: the calls of `DenseDecoder`, computed by a model of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.core.kv_cache import KVCache
from nanoengine.errors import UnsupportedModel
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.layers.attention import Attention as PagedAttention
from nanoengine.models.layers.factory import Factory
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.transformers_backend.fusion import (
    FusedAttention,
    RecordedCalls,
    fuse_rotations,
    fused_attention,
    fused_mlp,
)
from nanoengine.models.transformers_backend.halves import Halves
from nanoengine.models.transformers_backend.interface import STEP, Attention, AttentionCall, values_alone
from nanoengine.models.transformers_backend.modules import LinearGroup
from nanoengine.models.transformers_backend.probe import attention_calls

logger = logging.getLogger("nanoengine")

TOKENS_COMPARED = 40
"""Of the text whose logits are compared with those by transformers' own attention."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Of log probabilities, and of hidden states where each token sees itself alone."""


class TransformersDecoder:
    """A decoder of transformers whose attention, products and norms are those of this engine.

    Args:
        model: with its weights, as `loading.load` returns it.
        calls: of attention, as a probe saw them.
        config: the sizes of the KV cache: those of the largest call.

    Raises:
        UnsupportedModel: it computes otherwise than the probe saw, or than by transformers' own attention.
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
        self.specs = [call.spec(config.layer(number).window) for number, call in enumerate(calls)]
        self.attention, self.halves = Attention(model), Halves(model)
        self.positions = torch.tensor([7, 0, 3, 4, 9], device=factory.device)
        self.ids = self._drawn(len(self.positions))
        with torch.no_grad():
            self._count_positions()
            self._check_tokens_alone()
            theirs = self._logits_by_transformers("eager")
            self.rotations = self._fuse()
            self.prepare(TOKENS_COMPARED + 2)
            self._check_attention(theirs)

    def _drawn(self, count: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(count)
        ids = torch.randint(0, min(self.config.vocab_size, 2**15), (count,), generator=generator, device="cpu")
        return ids.to(self.factory.device)

    def _count_positions(self) -> None:
        """Find the position that the model gives to a first token, if none is given to it."""
        _, wanted = attention_calls(self.halves, self.attention, self.ids, None)
        positions = torch.arange(len(self.ids), device=self.ids.device)
        for self.halves.first_position in range(3):
            _, hidden = attention_calls(self.halves, self.attention, self.ids, positions)
            if self._distance(hidden, wanted) < TOLERANCES[hidden.dtype]:
                return
        raise UnsupportedModel(f"{self.halves.name} counts positions in a way of its own")

    def _check_tokens_alone(self) -> None:
        """Where each token sees itself alone, a token must be the same alone and beside others, or the model mixes them elsewhere."""
        calls, together = attention_calls(self.halves, self.attention, self.ids, self.positions)
        if calls != self.calls:
            raise UnsupportedModel(f"{self.halves.name} calls attention otherwise with its weights than without")
        pairs = zip(self.ids.split(1), self.positions.split(1), strict=True)
        alone = torch.cat([attention_calls(self.halves, self.attention, *pair)[1] for pair in pairs])
        if not (distance := self._distance(alone, together)) < TOLERANCES[together.dtype]:
            raise UnsupportedModel(
                f"{self.halves.name} mixes tokens outside of its attention, as recurrent states and convolutions do: a token beside "
                f"others is off by {distance:.2g}"
            )

    @staticmethod
    def _distance(ours: Tensor, theirs: Tensor) -> float:
        return float((ours - theirs).abs().max() / theirs.abs().max())

    def _logits_by_transformers(self, name: str) -> Tensor:
        ids = self._drawn(TOKENS_COMPARED)
        self.attention.use(name)
        logits = self.halves.head(self.halves.layers(ids, torch.arange(len(ids), device=ids.device)))
        return logits.float().log_softmax(-1)

    def _check_attention(self, theirs: Tensor) -> None:
        """Compare log probabilities of a text with those of transformers' own attention on the same weights."""
        count, size, device = TOKENS_COMPARED, self.backend.block_size, self.factory.device
        blocks, shape = -(-count // size), self.backend.kv_shape(1, self.config.num_kv_heads, self.config.head_dim)[1:]
        dtype = torch.int8 if self.backend.quantized else self.factory.dtype
        cache = KVCache(blocks, [list(range(len(self.calls)))], shape, dtype, device)
        positions = torch.arange(count, device=device)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
            query_lens_list=[count],
            seq_lens_list=[count],
            kv_cache=cache.layers,
            slot_mapping=positions + size,
            num_decodes=0,
        )
        hidden = self.forward(self._drawn(count), positions, [metadata] * len(self.calls))
        distance = float((self.compute_logits(hidden).log_softmax(-1) - theirs).abs().max())
        logger.debug("%s: log probabilities are off by %.2g from transformers' own", self.halves.name, distance)
        allowed = TOLERANCES[self.factory.dtype] * (10 if self.backend.quantized else 1)
        if distance < allowed:
            return
        noise = float((self._logits_by_transformers("sdpa") - theirs).abs().max())
        self.attention.use(STEP)
        if not distance < 4 * noise:
            raise UnsupportedModel(
                f"{self.halves.name}: log probabilities of {count} tokens are off by {distance:.2g} from those of transformers' own "
                f"attention, and at most {max(allowed, 4 * noise):.2g} is noise"
            )

    def _fuse(self) -> list[Any]:
        with RecordedCalls(self.model) as calls:
            attention_calls(self.halves, self.attention, self.ids, self.positions)
        rotations = fuse_rotations(calls, self.positions + self.halves.first_position)
        for rotation in rotations:
            rotation.prepare(int(self.positions.max()) + 3)
        heads: dict[nn.Module, tuple[int, tuple[Tensor, Tensor, Tensor]]] = {}
        number = 0

        def compute(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
            nonlocal number
            heads[module] = number, (query, key, value)
            number += 1
            return values_alone(query, value)

        self.attention.compute = compute
        with RecordedCalls(self.model) as calls:
            self.halves.layers(self.ids, self.positions)
        self.num_fused = 0
        once = {call.module for call in calls if sum(other.module is call.module for other in calls) == 1}
        for call in calls:
            if call.module in heads and call.module in once:
                number, given = heads[call.module]
                if self._fits(number):
                    paged = lambda *norms, number=number: PagedAttention(number, self.config, self.specs[number], self.backend, *norms)
                    fused: Any = fused_attention(call, given, self.kernels, self.attention, paged)
                else:
                    fused = None
            else:
                fused = fused_mlp(call, self.kernels)
            if fused is not None:
                call.module.forward = fused
                self.num_fused += isinstance(fused, FusedAttention)
        return rotations

    def _fits(self, number: int) -> bool:
        """Whether the heads of a call are those of the KV cache, and it has no sinks."""
        call, config = self.calls[number], self.config
        sizes = call.num_kv_heads, call.key_dim, call.value_dim
        return sizes == (config.num_kv_heads, config.head_dim, config.head_dim) and not call.sinks

    def prepare(self, max_len: int) -> None:
        """Make ready for positions below `max_len`."""
        for rotation in self.rotations:
            rotation.prepare(max_len + self.halves.first_position)
        self.attention.use(STEP)
        self.attention.compute = self._attend

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """[num_tokens] ids and positions, and what each layer reads and writes -> [num_tokens, hidden_size]."""
        self.attention.metadata, self.attention.layer = metadata, 0
        return self.halves.layers(input_ids, positions)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any, more: Mapping[str, Any]
    ) -> Tensor:
        number, size, kv_heads = self.attention.layer, self.config.head_dim, self.config.num_kv_heads
        seen = self.attention.next_layer()
        width = value.shape[-1]
        q, k, v = (_widened(heads[0].transpose(0, 1), size) for heads in (query, key, value))
        if k.shape[1] < kv_heads:
            k, v = (heads.repeat_interleave(kv_heads // heads.shape[1], 1) for heads in (k, v))
        kv, sinks = seen.kv_cache[number], more.get("s_aux")
        self.backend.write_kv(k, v, kv, seen.slot_mapping)
        out = self.backend.attend(q, kv, seen, self.specs[number], None if sinks is None else sinks.float())
        return out[None, ..., :width].contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in float32."""
        return self.halves.head(hidden).float()


def _widened(heads: Tensor, size: int) -> Tensor:
    """With zeros behind each head, which change no score."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))
