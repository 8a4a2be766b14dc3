"""Replicas without processes: a fleet, engines without tensors, and messages that wait until somebody delivers them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.seams import KVStore
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.lora.adapters import Adapters
from nanoengine.features.observability.kv_events import KVEventPublisher
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.scale.replicas.engine import ReplicatedEngine, mirror
from nanoengine.scale.replicas.fleet import Fleet
from nanoengine.scale.replicas.messages import Finish, StepUpdate
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.replica import Replica
from nanoengine.scale.replicas.router import Router
from tests.core.toys import VOCAB, ToyModel, make_engine
from tests.features.kv_offload.toys import SEED, SIZE, Files, OffloadToy, offload_engine
from tests.serve.aio.toys import LogprobListener

HASH_SEED = 5
BLOCK_SIZE = 4


def new_blocks(num_blocks: int = 400, stores: Iterable[KVStore] = ()) -> BlockManager:
    """Blocks whose hashes are those of all replicas."""
    blocks = BlockManager(num_blocks, BLOCK_SIZE, stores=[*stores])
    blocks.seed = HASH_SEED
    return blocks


class ToyMember:
    """A replica, and the messages on their way to it and from it.

    Args:
        files: of all members, where they have some; each knows those that are there when it is made.
        adapters: its own.
    """

    def __init__(
        self,
        number: int,
        rng: random.Random,
        files: Files | None = None,
        adapters: Adapters | None = None,
        **way: Any,
    ):
        self.number = number
        events = KVEventPublisher()
        num_blocks = way.pop("num_blocks", 400)
        if files is None:
            blocks = new_blocks(num_blocks, [events])
            parts = [LogprobListener(), *([] if adapters is None else [adapters])]
            engine = make_engine(blocks=blocks, model=ToyModel(BLOCK_SIZE), parts=parts, **way)
            self.replica = Replica(engine, events, adapters=adapters)
        else:
            assert (SIZE, SEED) == (BLOCK_SIZE, HASH_SEED)
            max_staged = way.pop("max_staged", 40)
            model, parts = OffloadToy(files, rng, bad=way.pop("bad", 0.0)), [LogprobListener()]
            engine, self.offload = offload_engine(
                model, num_blocks=num_blocks, max_staged=max_staged, parts=parts, stores=[events], **way
            )
            self.replica = Replica(engine, events)
        self.inbox: deque[Any] = deque()
        self.outbox: deque[StepUpdate] = deque()

    def send(self, message: Any) -> None:
        self.inbox.append(message)

    def read(self) -> None:
        """Take a message."""
        if self.inbox:
            self.replica.receive(self.inbox.popleft())

    def step(self) -> None:
        if (news := self.replica.step()) is not None:
            self.outbox.append(news)


class World:
    """A fleet of them, and how its requests are made.

    Args:
        files: that all have.
        adapters: of the requests.
    """

    def __init__(self, rng: random.Random, files: Files | None = None, adapters: Adapters | None = None):
        self.rng, self.files = rng, files
        self.front = make_engine(blocks=new_blocks())
        blocks = self.front.scheduler.blocks
        router = Router(BLOCK_SIZE)
        hashes = lambda seq: [hash for hash, _ in blocks.hit_hashes(seq)]  # noqa: E731
        self.fleet = Fleet(router, hashes, self._begin, adapters=adapters)
        self.members: dict[int, ToyMember] = {}
        self.num_members = self.num_begun = 0

    def _begin(self, seq: Sequence) -> None:
        self.num_begun += 1

    def join(self, **way: Any) -> ToyMember:
        self.num_members += 1
        member = self.members[self.num_members] = ToyMember(self.num_members, self.rng, self.files, **way)
        self.fleet.join(member.number, member)
        return member

    def kill(self, number: int) -> list[Request]:
        """With all that is on its way to it, and from it."""
        del self.members[number]
        return self.fleet.lose(number)

    def drain(self, number: int) -> None:
        del self.members[number]
        self.fleet.drain(number)

    def deliver(self, member: ToyMember) -> None:
        if member.outbox:
            self.fleet.receive(member.number, member.outbox.popleft())

    def submit(self, request: Request) -> None:
        self.front.queue(request)
        mirror(request, self.front.tokenizer)
        self.fleet.submit(request)

    def abort(self, request: Request) -> None:
        if request in self.fleet.running:
            self.fleet.abort(request, Finish("abort"))

    def run(self, most: int = 5000) -> None:
        """Deliver everything until nothing runs."""
        while self.fleet.running:
            for member in list(self.members.values()):
                member.read()
                member.step()
                self.deliver(member)
            most -= 1
            assert most, "the fleet does not come to an end"


def replicated(carrier: Any, options: ReplicaOptions) -> ReplicatedEngine:
    engine = make_engine(parts=[], kind=partial(ReplicatedEngine, carrier, options, None))
    assert isinstance(engine, ReplicatedEngine)
    return engine


def draw_requests(engine: LLMEngine, seed: int, count: int = 10) -> list[Request]:
    """Prompts that share beginnings; seeds, ends and completions of all kinds."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for number in range(count):
        prompt = shared[: rng.choice([0, 8, 13, 20])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]),
            seed=number,
            logprobs=0,
            max_tokens=rng.randint(1, 20),
            ignore_eos=bool(number % 2),
            stop=rng.choice([(), ("k",), ("ab", "q")]),
            include_stop_str_in_output=rng.random() < 0.5,
        )
        requests.append(engine.make_request(prompt, params, priority=rng.choice([0, 0, 1])))
    return requests


def answers(requests: list[Request]) -> list[Any]:
    """All that callers see of each completion."""
    return [
        (seq.output_token_ids, seq.detokenizer.text, seq.logprobs, seq.finish_reason, seq.stop_reason)
        for request in requests
        for seq in request.sequences
        if seq.detokenizer is not None
    ]


def expected(seed: int, count: int = 10) -> list[Any]:
    """What one engine answers."""
    engine = make_engine(parts=[LogprobListener()])
    requests = draw_requests(engine, seed, count)
    for request in requests:
        engine.submit(request)
    while engine.has_unfinished:
        engine.step()
    return answers(requests)
