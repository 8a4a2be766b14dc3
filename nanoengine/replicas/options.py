"""Options of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.options import check, option

MOST_REPLICAS = 4096
MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of replicas; all are keyword arguments of `LLM`.

    Args:
        replicas: engines, each in a process of its own, that share the requests. A request goes where most of its prompt is
            cached and least is to do; if its replica dies, it goes on in another, with the same tokens. 0: one engine, in this
            process.
        max_replicas: more are started, up to so many, while too many tokens wait, and ended when there is little to do. None: as
            many as `replicas`.
        waiting_tokens_per_replica: tokens that may wait for each, before one more is started: those of prompts that are not
            computed, and up to 128 that are expected behind each. 1 or more.
        prefill_replicas: so many of the replicas, from the first, compute long prompts into the folder `kv_disk_path`, and the
            others go on from these files, so that a long prompt does not hold up what they are decoding. Fewer than `replicas`;
            0: all do both.
        min_prefill_tokens: tokens of a prompt that no other replica has cached, from which on it goes to a prefill replica first.
        replica_silence_seconds: a replica that says nothing for so long hangs, and is killed; one that starts may say nothing for
            60 seconds at least. Above 0.
        replica_step_seconds: so does one whose step takes longer. Above 0.
        replica_start_seconds: so does one whose start takes longer, the loading of the model included. Above 0.
        replica_wait_seconds: when no replica has run or been starting for so long, requests end, and new ones are refused until
            one is ready. Above 0.
        replica_start_attempts: a replica that could not be started so often, one time after the other, is given up. 1 or more.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    replicas: int = option(0, 0, MOST_REPLICAS)
    max_replicas: int | None = option(None, high=MOST_REPLICAS)
    waiting_tokens_per_replica: int = option(16384, high=2**40)
    prefill_replicas: int = option(0, 0, MOST_REPLICAS)
    min_prefill_tokens: int = option(512, high=2**40)
    replica_silence_seconds: float = option(20.0, 0, MOST_SECONDS, above=True)
    replica_step_seconds: float = option(300.0, 0, MOST_SECONDS, above=True)
    replica_start_seconds: float = option(1800.0, 0, MOST_SECONDS, above=True)
    replica_wait_seconds: float = option(120.0, 0, MOST_SECONDS, above=True)
    replica_start_attempts: int = option(10, high=2**20)

    def __post_init__(self) -> None:
        check(self)
        count = self.replicas
        if self.max_replicas is not None and not 0 < count <= self.max_replicas:
            raise InvalidConfig(
                f"max_replicas is {shown(self.max_replicas)}: it must be an integer from replicas, which is {count} and must be "
                f"above 0, to {MOST_REPLICAS}"
            )
        if self.prefill_replicas >= max(count, 1):
            raise InvalidConfig(
                f"prefill_replicas is {shown(self.prefill_replicas)}: it must be an integer from 0 to less than replicas, which "
                f"is {count}: the others decode"
            )

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.max_replicas or self.replicas
