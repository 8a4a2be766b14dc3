"""Replicas have the adapters of the requests that come to them, whatever becomes of replicas and adapters meanwhile."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.core.sequence import Request
from nanoengine.errors import InvalidRequest
from nanoengine.features.lora import adapters as lora
from nanoengine.features.lora.adapter import Adapter
from nanoengine.features.lora.adapters import SALT, Adapters
from nanoengine.features.lora.options import LoRAOptions
from nanoengine.models.names import DEMO
from nanoengine.scale.replicas.engine import ReplicatedEngine
from tests.features.lora.test_adapters import own_adapters
from tests.features.lora.written import linear_layers, write_adapter
from tests.scale.replicas.test_demo import OPTIONS
from tests.scale.replicas.test_fleet import draw_way
from tests.scale.replicas.world import World, answers, draw_requests, expected
from tests.scale.seen import told

MOST = 3
FAKES = {f"{i}": Adapter(f"{i}", f"{i}", f"digest {i}", {}) for i in range(6)}


class OfReplica(Adapters):
    """Sees that what its requests are given is what their salts say, and that there are never more than were allowed."""

    num_given = 0

    def give(self, request: Request, digest: str) -> None:
        assert request.cache_salt.endswith(SALT + digest)
        super().give(request, digest)
        self.num_given += 1

    def complete(self, step: Any) -> None:
        super().complete(step)
        assert set(self._slots.values()) <= set(range(MOST))


@pytest.mark.parametrize("seed", range(6))
def test_no_request_comes_before_its_adapter(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Loads, unloads, replaced names, kills, drains, joins and aborts; messages take any time."""
    monkeypatch.setattr(lora, "read_adapter", lambda _name, path, _shapes, **_limits: FAKES[path])
    rng, want, seen = random.Random(seed), expected(seed), Counter[str]()
    options = LoRAOptions(enable_lora=True, max_loras=MOST)
    for _ in range(10):
        front = Adapters(options, {})
        world = World(rng, adapters=front)
        every: list[OfReplica] = []

        def join(world: World = world, every: list[OfReplica] = every) -> None:
            every.append(OfReplica(options, {}))
            world.join(adapters=every[-1], **draw_way(rng))

        def change(front: Adapters = front) -> None:
            name = f"name {rng.randrange(3)}"
            try:
                if rng.random() < 0.3:
                    front.unload(name)
                    seen["unloaded"] += 1
                else:
                    front.load(name, rng.choice(list(FAKES)), makes_room=rng.random() < 0.3)
                    seen["loaded"] += 1
            except InvalidRequest as error:
                seen["no room"] += "no room" in str(error)

        join()
        requests = draw_requests(world.front, seed)
        waiting = requests.copy()
        while waiting:
            act = rng.random()
            if act < 0.1:
                request = waiting.pop(0)
                if front.loaded and rng.random() < 0.8:
                    front.use(request, rng.choice(list(front.loaded.values())))
                    seen["adapted"] += 1
                world.submit(request)
            elif act < 0.2:
                change()
            elif act < 0.22 and world.members:
                (world.kill if rng.random() < 0.5 else world.drain)(rng.choice(list(world.members)))
            elif act < 0.25:
                join()
            elif act < 0.28:
                world.fleet.set_adapters()
            elif world.members:
                member = rng.choice(list(world.members.values()))
                rng.choice([member.read, member.step, partial(world.deliver, member)])()
            for own in world.fleet.running.values():
                own.num_losses = 0
        join()
        world.run()
        assert answers(requests) == want
        for name in list(front.loaded)[1:]:
            front.unload(name)
        world.fleet.set_adapters()
        for member in world.members.values():
            while member.inbox:
                member.read()
            assert member.replica.adapters.in_memory() == front.in_memory()  # type: ignore[union-attr]
            assert not set(member.replica.adapters._slots) - front.in_memory().keys()  # type: ignore[union-attr]
        seen["given"] += sum(own.num_given for own in every)
        seen["moved"] += world.fleet.num_moves
    for happened in ("loaded", "unloaded", "no room", "adapted", "given", "moved"):
        assert seen[happened], seen


def test_one_that_was_never_brought_is_an_error_of_the_request() -> None:
    own = Adapters(LoRAOptions(enable_lora=True), {})
    with pytest.raises(InvalidRequest, match="the adapter of digest abc is not in this replica"):
        own.give(Request("1", None, [1], SamplingParams()), "abc")


def test_two_engines_in_processes_say_what_one_says(tmp_path: Path) -> None:
    """Where the adapters were read from, nothing is left. (Replicas that are killed: above, and tests/scale/replicas.)"""
    layers = linear_layers(DEMO)
    written = [write_adapter(tmp_path / str(seed), layers, seed, size=0.2) for seed in range(2)]
    adapters = [LoRARequest(f"adapter {i}", i + 1, str(path)) for i, path in enumerate(written)]
    prompts = [[(3 * i + j) % 200 for i in range(40)] for j in range(4)]
    each = [None, *adapters, adapters[0]]
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=1, ignore_eos=True)
    options = OPTIONS | {"num_threads": 1, "enable_lora": True, "max_loras": 2}
    with LLM("demo", **options) as llm:
        right = told(llm.generate(prompts, params, lora_request=each, use_tqdm=False))
    assert len({str(own) for own in right}) == len(right)
    options |= {"replicas": 2, "lora_modules": [f"{own.lora_name}={own.lora_path}" for own in adapters]}
    with LLM("demo", **options) as llm:
        shutil.rmtree(tmp_path / "0")
        asked = [own and LoRARequest(own.lora_name) for own in each]
        assert told(llm.generate(prompts, params, lora_request=asked, use_tqdm=False)) == right
        [again] = llm.generate(prompts[1:2], params, lora_request=asked[1], use_tqdm=False)
        assert (told([again]), again.num_cached_tokens) == (right[1:2], 32), (
            "the router knows who has computed it for whom"
        )
        own_adapters(llm).unload("adapter 0")
        third = LoRARequest("third", 3, str(write_adapter(tmp_path / "2", layers, 2, size=0.2)))
        found = told(llm.generate(prompts, params, lora_request=third, use_tqdm=False))
        assert not any(answer in right for answer in found)
        engine = llm.engine
        assert isinstance(engine, ReplicatedEngine)
        assert all(len(own.adapters) <= 2 for own in engine.fleet.replicas.values())
