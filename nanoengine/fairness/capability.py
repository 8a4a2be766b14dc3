"""What fairness installs: one object that is a gate of the scheduler and a listener of the engine."""

from __future__ import annotations

from typing import Any

from nanoengine.fairness.fair_share import FairShare
from nanoengine.fairness.options import FairnessOptions


class Fairness:
    """Shares among clients. Seams: `Gate`, `Listener`."""

    options = FairnessOptions

    def install(self, startup: Any) -> None:
        """Needs `startup.config` and `startup.num_rows`; fills `startup.gates` and `startup.listeners`."""
        shares = FairShare(startup.config.of(FairnessOptions).max_client_share, startup.num_rows)
        startup.gates.append(shares)
        startup.listeners.append(shares)
