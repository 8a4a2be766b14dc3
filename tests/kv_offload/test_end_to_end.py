"""Policy, copies and files together: a toy model whose slots are numbers in tensors."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.kv_offload.block_copier import BlockCopier
from nanoengine.kv_offload.capability import KVOffload
from nanoengine.kv_offload.options import KVOffloadOptions
from tests.core.test_policy_every_way import answers, draw_requests
from tests.core.toys import Done, ToyModel, make_engine, run

SIZE, NUM_BLOCKS = 4, 16
BLOCK_BYTES = SIZE * 3 * 4


class Slots(dict[tuple[int, int], tuple[int, int, int]]):
    """The slots of a toy model, in a tensor."""

    def __init__(self) -> None:
        self.pool = torch.full((NUM_BLOCKS + 1, SIZE, 3), -7, dtype=torch.int32)

    def __getitem__(self, where: tuple[int, int]) -> tuple[int, int, int]:
        token, position, group = self.pool[where].tolist()
        return token, position, group

    def __setitem__(self, where: tuple[int, int], slot: tuple[int, int, int]) -> None:
        self.pool[where] = torch.tensor(slot, dtype=torch.int32)


class TensorToy(ToyModel):
    """A `ToyModel` with a real `BlockCopier`."""

    copier: BlockCopier

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.slots: Slots = Slots()

    def launch(self, plan: StepPlan) -> Done:
        self.copier.begin(plan)
        done = super().launch(plan)
        assert isinstance(done._result, StepResult)
        self.copier.end(done._result)
        return done

    def close(self) -> None:
        self.copier.close()


def open_engine(options: KVOffloadOptions, *, enable_prefix_caching: bool = True, **more: Any) -> tuple[LLMEngine, Any]:
    """An engine of a toy model, with what start-up would know of it."""
    model, capability = TensorToy(), KVOffload()
    values = {KVOffloadOptions: options}
    config = SimpleNamespace(of=values.get, enable_prefix_caching=enable_prefix_caching, block_size=SIZE, model="none")
    cache = SimpleNamespace(places=[(model.slots.pool,)])
    startup: Any = SimpleNamespace(
        config=config,
        runner=SimpleNamespace(kv_cache=cache, parts=[]),
        stores=[],
        facts={},
        kernels=SimpleNamespace(name="toy", fingerprint=""),
        backend=SimpleNamespace(name="toy"),
        dtype=None,
        kv_dtype=None,
        model_config="toy",
        groups=[[0]],
        max_model_len=60,
        parts=[],
    )
    startup.blocks = BlockManager(NUM_BLOCKS, SIZE, stores=startup.stores)
    capability.policy(startup)
    [model.copier] = startup.runner.parts or [None]
    assert bool(capability.describe_itself(startup)) == options.is_used
    return make_engine(blocks=startup.blocks, model=model, parts=startup.parts, **more), capability.offload


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_and_later_engines_compute_less(seed: int, tmp_path: Path) -> None:
    plain = make_engine()
    requests = draw_requests(plain, seed)
    run(plain, requests)
    expected, rng, computed = answers(requests), random.Random(seed), []
    for number in range(4):
        memory = rng.choice([1, 5, 80]) * BLOCK_BYTES if number % 2 else None
        options = KVOffloadOptions(kv_disk_path=str(tmp_path), kv_host_memory=memory)
        way = {"depth": rng.choice([1, 2, 3]), "policy": rng.choice(["prefill_first", "mixed"])}
        engine, offload = open_engine(options, **way)
        run(engine, requests := draw_requests(engine, seed))
        assert answers(requests) == expected
        assert number == 0 or offload.stats.num_loaded_files > 0
        assert not offload.stats.num_bad_files
        engine.close()
        computed.append(engine.executor.num_computed)  # type: ignore[attr-defined]
    assert max(computed[1:]) < computed[0]
    engine, _ = open_engine(options)
    assert list(tmp_path.glob("*/*.kv"))
    assert engine.reset_prefix_cache()
    engine.close()
    assert not list(tmp_path.glob("*/*.kv")), "others see a reset at once"


def test_what_cannot_work_is_named() -> None:
    for path in ("/dev/null", "/proc/none", "a\0b"):
        with pytest.raises(InvalidConfig, match="kv_disk_path is"):
            open_engine(KVOffloadOptions(kv_disk_path=path))
    assert open_engine(KVOffloadOptions(), enable_prefix_caching=False)[1] is None
    with pytest.raises(InvalidConfig, match="enable_prefix_caching is False"):
        open_engine(KVOffloadOptions(preemption_mode="swap"), enable_prefix_caching=False)
