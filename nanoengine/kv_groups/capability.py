"""Windows of attention as a capability of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.kv_groups.common_prefix import CommonPrefix
from nanoengine.kv_groups.layouts import KVGroup, Need, group_layers

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class KVGroups(Capability):
    """Layers with windows get block tables of their own, and attention is told which blocks all decodes share."""

    def groups(self, startup: Startup) -> list[list[int]] | None:
        windows = startup.facts.get("windows")
        if windows is None or not any(windows):
            return None
        config = startup.config
        most_new = min(
            config.long_prefill_token_threshold or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        groups = group_layers(windows)
        startup.layouts[:] = [group.layout(most_new) for group in groups]
        startup.blocks_needed = Need(groups, config.block_size, most_new, startup.depth).num_blocks
        startup.facts["kv_groups"] = groups
        return [group.layers for group in groups]

    def policy(self, startup: Startup) -> None:
        startup.parts.append(CommonPrefix(startup.blocks))

    def describe_itself(self, startup: Startup) -> str | None:
        groups: list[KVGroup] = startup.facts.get("kv_groups", [])
        seen = ["all tokens" if group.window is None else f"a window of {group.window}" for group in groups]
        kinds = [f"{len(group.layers)} layers with {what}" for group, what in zip(groups, seen, strict=True)]
        return f"{len(groups)} KV groups: {', '.join(kinds)}" if groups else None
