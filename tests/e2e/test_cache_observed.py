"""What the outside can see of the prefix cache: statistics, and events from which a router knows what is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.observability.kv_events import AllCleared, BlockRemoved, BlockStored, KVEvent

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Router:
    """Follows the events of an engine, and says how much of a prompt it has; hashes come from the events alone."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.children: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self.alive: set[bytes] = set()

    def hear(self, event: KVEvent) -> None:
        if isinstance(event, BlockStored):
            self.children[event.parent_hash, tuple(event.token_ids())] = event.hash
            self.alive.add(event.hash)
        elif isinstance(event, BlockRemoved):
            self.alive.remove(event.hash)
        elif isinstance(event, AllCleared):
            self.alive.clear()

    def num_cached(self, prompt: list[int]) -> int:
        hash, count = b"", 0
        while count + self.block_size < len(prompt):
            found = self.children.get((hash, tuple(prompt[count : count + self.block_size])))
            if found not in self.alive or found is None:
                break
            hash, count = found, count + self.block_size
        return count


def test_a_router_that_listens_knows_what_the_engine_has(tiny_llm: LLM) -> None:
    router = Router(block_size=16)
    tiny_llm.listen_to_kv_events(router.hear)
    prompts = [[i % 3] * 40 + [i] * (20 + 10 * i) for i in range(30)]  # more than the pool of 200 blocks holds
    for prompt in [*prompts, *prompts[::-3]]:
        expected = router.num_cached(prompt)
        [output] = tiny_llm.generate([prompt], ONE, use_tqdm=False)
        assert output.num_cached_tokens == expected
    assert tiny_llm.cache_stats.num_evicted_blocks > 0
    assert tiny_llm.reset_prefix_cache()
    assert router.alive == set()


def test_a_disk_path_that_cannot_be_a_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidConfig, match=r"kv_disk_path is .*file', which cannot be used"):
        LLM(str(tiny), num_kv_blocks=9, max_model_len=64, kv_disk_path=str(tmp_path / "file"), use_tqdm=False)


def test_who_stops_listening_hears_no_more(tiny_llm: LLM) -> None:
    events: list[KVEvent] = []
    tiny_llm.listen_to_kv_events(events.append)
    tiny_llm.generate([[1] * 33], ONE, use_tqdm=False)
    assert len(events) == 2
    tiny_llm.listen_to_kv_events(None)
    tiny_llm.generate([[2] * 33], ONE, use_tqdm=False)
    assert len(events) == 2


def test_statistics_tell_what_was_asked_for_and_what_was_there(tiny_llm: LLM) -> None:
    tiny_llm.generate([[1] * 33], ONE, use_tqdm=False)
    tiny_llm.generate([[1] * 40], ONE, use_tqdm=False)
    stats = tiny_llm.cache_stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (73, 32)
    assert stats.hit_rate == stats.recent_hit_rate == 32 / 73
