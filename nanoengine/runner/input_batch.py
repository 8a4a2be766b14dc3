"""InputBatch: the tensors of one step, made from a ScheduledBatch.

Here lengths and block ids become positions and slots: slot = block_table[position // block_size] * block_size
+ position % block_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionMetadata, KVLayer
from nanoengine.engine.block_pool import NULL_BLOCK
from nanoengine.engine.messages import ScheduledBatch


@dataclass
class InputBatch:
    """What the model's forward pass takes, and which of its rows are sampled."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    sampled_rows: Tensor  # [num_sampled] int64: indices into the tokens of the step

    @classmethod
    def build(cls, batch: ScheduledBatch, kv_cache: list[KVLayer], block_size: int, device: torch.device) -> InputBatch:
        """Make the tensors of a step; everything is computed on the host and sent in one piece each."""
        query_lens = np.array(batch.num_new_tokens, dtype=np.int64)
        computed = np.array(batch.num_computed_tokens, dtype=np.int64)
        query_start_loc = np.zeros(len(batch) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])

        sequence_of_token = np.repeat(np.arange(len(batch)), query_lens)
        positions = np.arange(len(batch.token_ids)) - query_start_loc[sequence_of_token] + computed[sequence_of_token]

        block_tables = np.full((len(batch), max(map(len, batch.block_tables))), NULL_BLOCK, dtype=np.int32)
        for row, table in enumerate(batch.block_tables):
            block_tables[row, : len(table)] = table
        blocks = block_tables[sequence_of_token, positions // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + positions % block_size
        sampled_rows = query_start_loc[np.array(batch.sampled_rows, dtype=np.int64) + 1] - 1

        def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        seq_lens = computed + query_lens
        return cls(
            input_ids=tensor(np.array(batch.token_ids, dtype=np.int64), torch.int64),
            positions=tensor(positions, torch.int64),
            metadata=AttentionMetadata(
                phase=batch.phase,
                kv_cache=kv_cache,
                query_start_loc=tensor(query_start_loc, torch.int32),
                seq_lens=tensor(seq_lens, torch.int32),
                block_tables=tensor(block_tables, torch.int32),
                slot_mapping=tensor(slot_mapping, torch.int64),
                query_lens_list=batch.num_new_tokens,
                seq_lens_list=seq_lens.tolist(),
            ),
            sampled_rows=tensor(sampled_rows, torch.int64),
        )
