"""Fairness among clients, as a capability of the engine."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from nanoengine.core.capability import Capability
from nanoengine.core.scheduler import MIXED
from nanoengine.core.startup import Startup
from nanoengine.features.fairness.block_share import BlockShare
from nanoengine.features.fairness.clients import Clients
from nanoengine.features.fairness.least_priority import LeastPriority
from nanoengine.features.fairness.options import FairnessOptions
from nanoengine.features.fairness.time_share import TimeShare


class Fairness(Capability):
    """Fair shares, a part of the policy while several clients have requests; and the limit of priorities."""

    options = FairnessOptions
    time: TimeShare | None = None  # set by `policy` with `fair_shares`

    def policy(self, startup: Startup) -> None:
        config, options = startup.config, startup.config.of(FairnessOptions)
        if options.fair_shares:
            clients: Counter[str] = Counter()
            blocks = BlockShare(startup.blocks, startup.num_rows, clients)
            self.time = time = TimeShare(
                clients,
                startup.blocks,
                startup.num_rows,
                config.max_num_batched_tokens,
                config.long_prefill_token_threshold or config.max_num_batched_tokens,
                is_mixed=config.scheduling_policy == MIXED,
                clock=perf_counter,
            )
            startup.parts.append(Clients(clients, time, blocks, startup.parts))
        if options.min_priority is not None:
            startup.parts.append(LeastPriority(options.min_priority))
