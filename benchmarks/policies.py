"""The scheduler's policies, tried on one engine, turn by turn: what they are is read anew for every step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.options import positive_int
from nanoengine.core.config import POLICIES
from nanoengine.core.scheduler import Scheduler


class Variant(NamedTuple):
    """Who comes first in a step, and how many tokens of one prompt it may have."""

    policy: str
    chunk: int

    @property
    def case(self) -> dict[str, Any]:
        return self._asdict()


def add_policy_options(
    parser: argparse.ArgumentParser, policies: Sequence[str] | None = None, chunks: Sequence[int] | None = None
) -> None:
    """`--policy` and `--chunk`, with these defaults; None: as the engine's options say."""
    group = parser.add_argument_group("policies: each with each chunk, turn by turn on the same arrivals")
    shown = "the engine's own" if policies is None else " ".join(policies)
    group.add_argument("--policy", nargs="+", choices=POLICIES, default=policies, help=f"(default: {shown})")
    shown = "the engine's own" if chunks is None else " ".join(map(str, chunks))
    group.add_argument(
        "--chunk",
        nargs="+",
        type=positive_int,
        default=chunks,
        metavar="TOKENS",
        help=f"most tokens of one prompt in a step, long_prefill_token_threshold (default: {shown})",
    )


def variants(args: argparse.Namespace, scheduler: Scheduler) -> list[Variant]:
    """What the options ask for."""
    policies, chunks = args.policy or [scheduler.policy], args.chunk or [scheduler.max_chunk]
    return [Variant(policy, chunk) for policy in dict.fromkeys(policies) for chunk in dict.fromkeys(chunks)]


@contextmanager
def scheduling(scheduler: Scheduler, variant: Variant) -> Iterator[None]:
    """Let the scheduler of an idle engine share out its steps in another way: two engines would hold the weights twice."""
    assert not scheduler.has_unfinished
    before = Variant(scheduler.policy, scheduler.max_chunk)
    scheduler.policy, scheduler.max_chunk = variant
    try:
        yield
    finally:
        scheduler.policy, scheduler.max_chunk = before
