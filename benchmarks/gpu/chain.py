"""Chain: the layers and the head of a model, one decode step in one CUDA graph, as an engine records it.

Kernels are timed in it because it has what one kernel, fifty times in a row, has not: their edges, where a kernel may start while
the one before it ends, and weights that are in no cache. Weights and K/V are random, made on the device from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.clock import record, seconds
from benchmarks.random_weights import SHAPES
from nanoengine.core.attention import AttentionMetadata, AttentionSpec, KVLayer, Runs
from nanoengine.kernels.operations import QuantizedSlot
from nanoengine.kernels.reference.kv_int8 import MOST
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.attention.kv_int8 import views
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import build_model
from nanoengine.models.loader import Quantizer

BLOCK_SIZE = 16
MOST_SEQS = 256
"""As many blocks of the pool hold new tokens."""
AT_ONCE = 8
"""Layers in one graph, where one is timed."""


@dataclass
class Inputs:
    """A step of decodes: one new token for each sequence. All tensors are on the device."""

    input_ids: Tensor  # [num_seqs] int64, as positions and slots
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor  # [num_seqs] int32: with the new token
    starts: Tensor  # [num_seqs + 1] int32: each sequence's first new token
    tables: Tensor  # [num_seqs, width] int32

    def copy_(self, other: Inputs) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def clone(self) -> Inputs:
        return Inputs(**{name: tensor.clone() for name, tensor in vars(self).items()})

    def turned(self) -> Inputs:
        """The same sequences in the opposite order, with other tokens: no number of one step is right in the other. Both write to
        the same slots, and neither reads what the other has written.
        """
        flipped = {name: tensor.flip(0) for name, tensor in vars(self).items()}
        return Inputs(**flipped | {"input_ids": self.input_ids.flip(0) ^ 1, "starts": self.starts.clone()})


class Chain:
    """A model and a pool of K/V.

    Args:
        shape: a key of SHAPES.
        num_tokens: of K/V, for all sequences of a step.
        num_layers: of the model, if fewer than the shape has.
        quantize: makes the weights that layers get; none: they stay numbers.
        int8_kv: K and V have 8 bits.
    """

    def __init__(
        self,
        shape: str,
        device: torch.device,
        dtype: torch.dtype,
        num_tokens: int,
        num_layers: int | None = None,
        quantize: Quantizer | None = None,
        *,
        int8_kv: bool = False,
    ):
        facts = SHAPES[shape] | {"dtype": str(dtype).removeprefix("torch.")}
        if num_layers is not None:
            facts["num_hidden_layers"] = num_layers
        self.config, self.device, self.dtype = read_model_config(facts), device, dtype
        self.random = torch.Generator(device).manual_seed(0)
        self.kernels, self.backend = TritonKernels(DEFAULTS), TritonAttention(BLOCK_SIZE, DEFAULTS)
        self.model = build_model(self.config, self.kernels, self.backend, dtype, device)
        for slot in self.model.checkpoint_tensors().values():
            values = 1 + self.normal(*slot.shape) / 8 if len(slot.shape) == 1 else self.normal(*slot.shape) / 32
            if quantize is not None and isinstance(slot, QuantizedSlot) and len(slot.shape) == 2:
                slot.copy_quantized(quantize(values))
            else:
                slot.copy_(values)
        self.num_blocks = MOST_SEQS + -(-num_tokens // BLOCK_SIZE)
        self.max_len = self.config.max_position_embeddings
        self.model.prepare(self.max_len)
        self.backend.quantized = int8_kv
        shape_of_kv = self.backend.kv_shape(self.num_blocks, self.config.num_kv_heads, self.config.head_dim)
        make = self.numbers if int8_kv else self.normal
        self.kv = [(make(*shape_of_kv), make(*shape_of_kv)) for _ in range(self.config.num_layers)]

    def normal(self, *shape: int) -> Tensor:
        """The same numbers in every dtype: they are rounded to bfloat16 first."""
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=self.random)
        return numbers.to(self.dtype)

    def numbers(self, *shape: int) -> Tensor:
        """K or V of 8 bits: `normal`, cut off at three standard deviations."""
        pool = torch.empty(shape, dtype=torch.int8, device=self.device)
        numbers, scales = views(pool, BLOCK_SIZE)
        numbers.copy_((self.normal(*numbers.shape) * (MOST / 3)).round_().clamp_(-MOST, MOST))
        scales.fill_(3 / MOST)
        return pool

    def tune(self, tuning: Tuning) -> None:
        self.kernels.tuning = self.backend.tuning = tuning

    def inputs(self, lens: Sequence[int]) -> Inputs:
        """A step of sequences of about these lengths, whose blocks lie anywhere in the pool.

        The new token of each is the first of a block that holds new tokens alone: no step reads what another one has written.
        """
        random = torch.Generator().manual_seed(0)
        counts = [n // BLOCK_SIZE for n in lens]
        blocks = MOST_SEQS + torch.randperm(self.num_blocks - MOST_SEQS, generator=random)[: sum(counts)]
        tables = torch.zeros(len(lens), self.max_len // BLOCK_SIZE, dtype=torch.int32)
        for i, (count, own) in enumerate(zip(counts, blocks.split(counts), strict=True)):
            tables[i, :count], tables[i, count] = own, i
        positions = torch.tensor(counts) * BLOCK_SIZE
        last = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
        ids = torch.randint(self.config.vocab_size, (len(lens),), generator=random)
        starts = torch.arange(len(lens) + 1, dtype=torch.int32)
        slots = last * BLOCK_SIZE + positions % BLOCK_SIZE
        step = ids, positions, slots, positions.to(torch.int32) + 1, starts, tables
        return Inputs(*(tensor.to(self.device) for tensor in step))

    def run(self, step: Inputs) -> Tensor:
        """The logits of a step, and its K and V in the pool."""
        num_seqs = len(step.seq_lens)
        metadata = AttentionMetadata(
            kv_cache=self.kv,
            slot_mapping=step.slots,
            num_decodes=num_seqs,
            query_start_loc=step.starts,
            seq_lens=step.seq_lens,
            block_tables=step.tables,
            query_lens_list=[1] * num_seqs,
            seq_lens_list=[self.max_len] * num_seqs,  # a bound, as a recorded step has it
        )
        hidden = self.model.forward(step.input_ids, step.positions, [metadata] * len(self.kv))
        return self.model.compute_logits(hidden)

    @torch.inference_mode()
    def record(self, step: Inputs) -> Callable[[], Tensor]:
        """What runs the step again, on whatever stands in the same tensors: a CUDA graph where there is a GPU."""
        return record(self.device, partial(self.run, step))

    def queries(self, query_lens: list[int], seq_lens: list[int]) -> tuple[Tensor, Runs]:
        """Runs of sequences whose blocks lie anywhere in the pool; several may share some."""
        width = -(-max(seq_lens) // BLOCK_SIZE)
        tables = torch.stack([torch.randperm(self.num_blocks, device=self.device)[:width] for _ in seq_lens])
        starts, lens = (
            torch.tensor(numbers, dtype=torch.int32, device=self.device) for numbers in ([0, *query_lens], seq_lens)
        )
        runs = Runs(starts.cumsum(0, dtype=torch.int32), lens, tables.to(torch.int32), query_lens, seq_lens)
        return self.normal(sum(query_lens), self.config.num_heads, self.config.head_dim), runs

    @property
    def spec(self) -> AttentionSpec:
        """Of all layers."""
        return AttentionSpec(self.config.head_dim**-0.5)

    def layer_seconds(self, attend: Callable[[KVLayer], Tensor], repeat: int) -> float:
        """Of attention in one layer, in a graph of some."""
        layers = self.kv[:AT_ONCE]
        work = record(self.device, lambda: [attend(kv) for kv in layers][-1])
        return seconds(self.device, work, repeat) / len(layers)

    def written(self, step: Inputs) -> Tensor:
        """K and V that a step has written: [layers, 2, num_seqs, heads, head_dim] of the first and the last layer."""
        block, place = step.slots // BLOCK_SIZE, step.slots % BLOCK_SIZE
        caches = [cache for layer in (self.kv[0], self.kv[-1]) for cache in layer]
        if self.backend.quantized:
            rows = [views(cache, BLOCK_SIZE)[0][block, place] for cache in caches]
        else:
            rows = [cache[block, :, place] for cache in caches]
        return torch.stack(rows).unflatten(0, (2, 2))
