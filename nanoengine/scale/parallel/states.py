"""Partition of layers with states among ranks: by heads, as in attention, or by channels where there are no heads."""

from __future__ import annotations

from nanoengine.errors import InvalidConfig
from nanoengine.models.layers.state_partition import Unit
from nanoengine.models.model_config import StateConfig
from nanoengine.scale.parallel.partition import Partition, outputs


def units_of_ranks(facts: StateConfig, size: int) -> dict[Unit, list[range]]:
    """Heads and groups, or channels, of each rank. A group of heads is partitioned like a K/V head with its query heads.

    Raises:
        InvalidConfig: more ranks than heads, or the heads of a group stand apart.
    """
    if facts.is_tiled and facts.num_heads > facts.num_groups:
        raise InvalidConfig(
            f"tensor_parallel_size is {size}, but in this GGUF file heads that share queries and keys stand apart, so that a "
            "rank cannot have all of them; take the model's folder from Hugging Face, or one rank"
        )
    if not facts.num_heads:
        return {"channels": outputs(facts.channels, size)}
    partition = Partition(size, facts.num_heads, facts.num_groups, facts.width, "heads in its layers with states")
    return {"heads": partition.heads, "groups": partition.kv_heads}
