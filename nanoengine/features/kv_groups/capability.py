"""KV cache groups, and layers with recurrent states, as a capability of the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup
from nanoengine.features.kv_groups.common_prefix import CommonPrefix
from nanoengine.features.kv_groups.layouts import BlockDemand, KVGroup, group_layers
from nanoengine.features.kv_groups.options import KVGroupsOptions
from nanoengine.features.kv_groups.snapshots import Snapshots
from nanoengine.sizes import format_bytes

if TYPE_CHECKING:
    from nanoengine.models.model_config import ModelConfig


SNAPSHOT_FRACTION, SNAPSHOT_CAP = 1 / 8, 1 << 30
"""Default memory of snapshots: a fraction of the available RAM or of a GPU's free memory, and most bytes."""


class KVGroups(Capability):
    """Layers with windows get separate block tables, attention gets the common prefix of all decodes, and layers with states get
    slots.

    KV groups number the attention layers.
    """

    options = KVGroupsOptions
    snapshots: Snapshots | None = None
    """Set by `policy`, if the model has states."""
    _groups: Sequence[KVGroup] = ()

    def groups(self, startup: Startup) -> list[list[int]] | None:
        windows = startup.windows
        if startup.state_shapes is not None:
            self._check_states(startup)
        if windows is None or not any(windows):
            # A model without attention layers gets an unused one: a block must have some bytes.
            return None if windows is None else [list(range(len(windows) or 1))]
        config = startup.config
        most_new = min(
            config.long_prefill_token_threshold or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        groups = group_layers(windows, chunked=startup.has_chunks)
        startup.layouts[:] = [group.layout(most_new) for group in groups]
        startup.blocks_needed = BlockDemand(groups, startup.block_size, most_new, startup.depth).num_blocks
        self._groups = groups
        return [group.layers for group in groups]

    def _check_states(self, startup: Startup) -> None:
        shapes, config = startup.state_shapes, startup.config
        assert shapes is not None
        num_layers = startup.num_state_layers = cast("ModelConfig", startup.model_config).num_state_layers
        self._slot_bytes = 4 * num_layers * sum(map(math.prod, shapes))
        memory = config.of(KVGroupsOptions).snapshot_memory
        if memory is None:
            memory = int(min(SNAPSHOT_CAP, SNAPSHOT_FRACTION * startup.device.available()))
        self._most_snapshots = memory // self._slot_bytes
        # Ranks must have as many slots as this process, and each would measure another amount of free memory.
        sized = dataclasses.replace(config.of(KVGroupsOptions), snapshot_memory=memory)
        startup.config = dataclasses.replace(config, options={**config.options, KVGroupsOptions: sized})

    def before_pool(self, startup: Startup) -> None:
        """On a GPU the state pool exists while the largest steps are measured. On a CPU its pages are allocated as they are
        used.
        """
        if not startup.num_state_layers or startup.device.is_cuda:
            return
        startup.later_bytes += (startup.num_rows + 1 + self._most_snapshots) * self._slot_bytes
        if self._is_sized(startup) and startup.later_bytes >= startup.device.available():
            raise self._no_room(startup, self._most_snapshots)

    def _is_sized(self, startup: Startup) -> bool:
        """Whether the number of blocks follows from the free memory."""
        return startup.config.num_kv_blocks is None and startup.config.kv_cache_memory is None

    def _no_room(self, startup: Startup, snapshots: int) -> InvalidConfig:
        return InvalidConfig(
            f"states of {startup.num_rows} sequences and {snapshots} snapshots, {format_bytes(self._slot_bytes)} each, do not"
            " fit into memory: lower max_num_seqs or snapshot_memory"
        )

    def _num_snapshots(self, startup: Startup) -> int:
        """At most one for each block, since a snapshot ends with a block. While a GPU is measured, the number of blocks is
        unknown.
        """
        is_measured = startup.device.is_cuda and self._is_sized(startup)
        return self._most_snapshots if is_measured else min(self._most_snapshots, startup.num_blocks)

    def runner(self, startup: Startup) -> None:
        if not startup.num_state_layers:
            return
        from nanoengine.features.kv_groups.state_keeper import StateKeeper
        from nanoengine.features.kv_groups.state_pool import StatePool

        rows, snapshots, mixers = startup.num_rows, self._num_snapshots(startup), cast(Any, startup.model).mixers
        shapes = next(iter(mixers.values())).shapes  # of the part of this process
        try:
            where = startup.block_bytes, startup.device.torch_device
            pool = StatePool(rows, snapshots, startup.num_state_layers, shapes, *where)
        except (RuntimeError, OSError) as error:  # torch's allocator raises a subclass of the first, mmap the second
            raise self._no_room(startup, snapshots) from error
        attending = cast("ModelConfig", startup.model_config).attention_layers or [0]  # see `groups`
        keeper = StateKeeper(startup.runner, pool, mixers, attending)
        startup.state_keeper = keeper
        startup.runner.parts.append(keeper)

    def policy(self, startup: Startup) -> None:
        startup.parts.append(CommonPrefix(startup.blocks))
        if startup.num_state_layers:
            first_slot = startup.num_rows + 1
            self.snapshots = Snapshots(startup.blocks, self._num_snapshots(startup), first_slot)
            startup.snapshots = self.snapshots
            startup.parts.append(self.snapshots)
            startup.stores.append(self.snapshots)

    def describe_itself(self, startup: Startup) -> str | None:
        kinds = [f"{len(group.layers)} layers with {group.visible_range}" for group in self._groups]
        words = [f"{len(kinds)} KV groups: {', '.join(kinds)}"] if kinds else []
        if count := startup.num_state_layers:
            size = f"{format_bytes(self._slot_bytes)} a sequence"
            words.append(f"{count} layers with states: {size}, room for {self._num_snapshots(startup)} snapshots")
        return "; ".join(words) or None
