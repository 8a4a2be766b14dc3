"""Two real engines in processes: one computes prompts into files, the other goes on from them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.replicas.engine import ReplicatedEngine
from tests.models.families import family_checkpoint

from .test_demo import told

OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 200,
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "use_tqdm": False,
    "num_threads": 1,
}
PROMPTS: list[Any] = [[5 + number, *range(20, 20 + length)] for number, length in enumerate((200, 90, 31, 15))]
PARAMS = [
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, n=2, logprobs=2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=9, max_tokens=20, best_of=3, n=2, top_k=30),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, prompt_logprobs=1),
]
FILED = (192, 80, 0, 0)
"""Tokens of each prompt in full blocks, where they are 32 or more."""


def test_the_other_replica_goes_on_from_files_and_tokens_are_those_of_one_engine(tmp_path: Path) -> None:
    with LLM("demo", **OPTIONS) as llm:
        expected = told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    own = {"replicas": 2, "prefill_replicas": 1, "min_prefill_tokens": 32, "kv_disk_path": str(tmp_path)}
    with LLM("demo", **own, **OPTIONS) as llm:
        engine = llm.engine
        assert isinstance(engine, ReplicatedEngine)

        def counts() -> list[Any]:
            engine.supervisor.ask_for_metrics()
            return [engine.supervisor.counts.by_number()[number] for number in range(2)]

        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert told(outputs) == expected
        assert tuple(output.num_cached_tokens for output in outputs) == FILED
        prefill, decode = counts()
        assert prefill.offload.num_written_files == decode.offload.num_loaded_files == sum(FILED) // 16
        assert decode.offload.num_bad_files == prefill.offload.num_loaded_files == 0
        assert engine.fleet.num_prefilled == 2

        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert engine.fleet.num_prefilled == 2, "who decodes has it"

        engine.reset_prefix_cache()
        counts()  # by then all have told it
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert engine.fleet.num_prefilled == 4

        # The files are gone: a miss.
        again = [[9, *prompt] for prompt in PROMPTS]
        request = engine.make_request(again[0], PARAMS[1])
        engine.submit(request)
        while not engine.fleet.num_prefilled > 4:
            engine.step()
        for path in tmp_path.glob("*/*.kv"):
            path.unlink()
        while engine.has_unfinished:
            engine.step()
        # The prefill replica dies: the request goes to the other one.
        [process] = [slot.current for slot in engine.supervisor.slots[:1]]
        assert process is not None
        lost = engine.make_request([8, *PROMPTS[0]], PARAMS[1])
        engine.submit(lost)
        assert engine.fleet.num_running(process.key) == 1
        os.kill(process.started.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while engine.has_unfinished:
            engine.step()
        assert engine.fleet.num_prefilled == 5
    with LLM("demo", **OPTIONS) as llm:
        for gone in (request, lost):
            [right] = told(llm.generate([gone.prompt_token_ids], PARAMS[1], use_tqdm=False))
            assert told([gone.output()]) == [right]
    shutil.rmtree(tmp_path)


def test_states_go_with_the_files(tmp_path: Path) -> None:
    folder = str(family_checkpoint(tmp_path, "Qwen3.5"))
    own = {"replicas": 2, "prefill_replicas": 1, "min_prefill_tokens": 32, "kv_disk_path": str(tmp_path / "kv")}
    prompts, params = PROMPTS[:2], PARAMS[:2]
    with LLM(folder, **OPTIONS) as llm:
        expected = told(llm.generate(prompts, params, use_tqdm=False))
    with LLM(folder, **own, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert told(outputs) == expected
        assert tuple(output.num_cached_tokens for output in outputs) == FILED[:2]
    with pytest.raises(InvalidConfig, match="prefill_replicas is 1, and snapshot_memory is 0"):
        LLM(folder, **own, snapshot_memory=0, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 2, "prefill_replicas": 1}, "kv_disk_path is None"),
        ({"replicas": 2, "prefill_replicas": 2, "kv_disk_path": "/tmp"}, "prefill_replicas is 2"),
        ({"prefill_replicas": 1}, "prefill_replicas is 1"),
        ({"replicas": 2, "prefill_replicas": True}, "prefill_replicas is True"),
        (
            {"replicas": 2, "prefill_replicas": 1, "kv_disk_path": "/tmp", "ray": True},
            "prefill_replicas is not 0: on a Ray",
        ),
        ({"replicas": 2, "min_prefill_tokens": 0}, "min_prefill_tokens is 0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        LLM("demo", **options, **OPTIONS)
