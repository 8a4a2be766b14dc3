"""Windows of attention, and states in its place, as a capability of the engine."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, cast

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.ram import available_ram
from nanoengine.kv_groups.common_prefix import CommonPrefix
from nanoengine.kv_groups.layouts import KVGroup, Need, group_layers
from nanoengine.kv_groups.options import KVGroupsOptions
from nanoengine.kv_groups.snapshots import Snapshots

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


SNAPSHOT_SHARE, SNAPSHOT_CAP = 1 / 8, 1 << 30
"""Of the available RAM, what snapshots may take if the user says nothing."""


class KVGroups(Capability):
    """Layers with windows get block tables of their own, and attention is told which blocks all decodes share. Layers with states
    get slots.

    KV groups number the layers that attend.
    """

    options = KVGroupsOptions
    snapshots: Snapshots | None = None
    """Set by `policy`, if the model has states."""

    def groups(self, startup: Startup) -> list[list[int]] | None:
        windows = startup.facts.get("windows")
        if startup.facts.get("states") is not None:
            self._check_states(startup)
        if windows is None or not any(windows):
            return None if windows is None else [list(range(len(windows)))]
        config = startup.config
        most_new = min(
            config.long_prefill_token_threshold or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        groups = group_layers(windows)
        startup.layouts[:] = [group.layout(most_new) for group in groups]
        startup.blocks_needed = Need(groups, config.block_size, most_new, startup.depth).num_blocks
        startup.facts["kv_groups"] = groups
        return [group.layers for group in groups]

    def _check_states(self, startup: Startup) -> None:
        shapes, config = startup.facts["states"], startup.config
        if startup.device.is_cuda:
            raise InvalidConfig(
                f"{startup.model_config.architecture} has layers with states, which are computed on a CPU alone: set device='cpu'"
            )
        num_layers = startup.model_config.num_layers - len(startup.facts["windows"])
        startup.facts["state_layers"] = num_layers
        self._slot_bytes = 4 * num_layers * sum(map(math.prod, shapes))
        memory = config.of(KVGroupsOptions).snapshot_memory
        if memory is None:
            memory = int(min(SNAPSHOT_CAP, SNAPSHOT_SHARE * available_ram()))
        self._most_snapshots = memory // self._slot_bytes
        # A worker process must have as many slots as are given out here, and it would find another amount of free memory.
        told = dataclasses.replace(config.of(KVGroupsOptions), snapshot_memory=memory)
        startup.config = dataclasses.replace(config, options={**config.options, KVGroupsOptions: told})

    def _num_snapshots(self, startup: Startup) -> int:
        """There is one for every block at most: they end with one."""
        return min(self._most_snapshots, startup.num_blocks)

    def runner(self, startup: Startup) -> None:
        if "state_layers" not in startup.facts:
            return
        from nanoengine.kv_groups.state_pool import EndedRows, StateKeeper, StatePool

        rows, shapes, snapshots = startup.num_rows, startup.facts["states"], self._num_snapshots(startup)
        try:
            pool = StatePool(rows, snapshots, startup.facts["state_layers"], shapes, startup.block_bytes)
        except OSError as error:
            raise InvalidConfig(
                f"states of {rows} sequences and {snapshots} snapshots, {self._slot_bytes} bytes each, do not fit into "
                "memory: lower max_num_seqs or snapshot_memory"
            ) from error
        keeper = StateKeeper(startup.runner, pool, cast(Any, startup.model).mixers)
        startup.facts["state_keeper"] = keeper
        startup.runner.parts += [EndedRows(keeper), keeper]

    def policy(self, startup: Startup) -> None:
        startup.parts.append(CommonPrefix(startup.blocks))
        if "state_layers" in startup.facts:
            interval = startup.config.of(KVGroupsOptions).snapshot_interval
            first_slot = startup.num_rows + 1
            self.snapshots = Snapshots(startup.blocks, self._num_snapshots(startup), interval, first_slot)
            startup.facts["snapshots"] = self.snapshots
            startup.parts.append(self.snapshots)
            startup.stores.append(self.snapshots)

    def describe_itself(self, startup: Startup) -> str | None:
        groups: list[KVGroup] = startup.facts.get("kv_groups", [])
        seen = ["all tokens" if group.window is None else f"a window of {group.window}" for group in groups]
        kinds = [f"{len(group.layers)} layers with {what}" for group, what in zip(groups, seen, strict=True)]
        words = [f"{len(groups)} KV groups: {', '.join(kinds)}"] if groups else []
        if count := startup.facts.get("state_layers"):
            size = f"{self._slot_bytes / 2**20:.1f} MiB a sequence"
            words.append(f"{count} layers with states: {size}, room for {self._num_snapshots(startup)} snapshots")
        return "; ".join(words) or None
