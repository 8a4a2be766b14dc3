"""A dataset of prompts to a dataset of outputs, on a real cluster. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal

import pytest

from nanoengine import SamplingParams
from nanoengine.builder import read_config
from nanoengine.errors import InvalidConfig, InvalidSamplingParams
from nanoengine.ray import batch
from nanoengine.ray.batch import Completer

from .cluster import OPTIONS, cluster, needs_ray, pids_of

needs_ray()

PARAMS = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
ROWS = [{"number": count, "prompt": "" if count % 17 == 3 else f"def number_{count}("} for count in range(240)]


def test_outputs_come_in_order_and_are_the_same_after_a_worker_is_lost() -> None:
    with cluster():
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        dataset = ray.data.from_items(ROWS, override_num_blocks=30)
        outputs = batch(dataset, "demo", PARAMS, batch_size=8, replicas=2, **OPTIONS)
        found, killed = [], []
        for row in outputs.iter_rows():
            found.append(row)
            if not killed:
                killed = pids_of("Completer")[:1]
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
        assert len(killed) == 1
        for bad, message in (({"prompt_column": "text"}, "no column 'text'"), ({"seed_column": "s"}, "no column 's'")):
            with pytest.raises(InvalidConfig, match=message):
                batch(dataset, "demo", PARAMS, **bad)
        with pytest.raises(InvalidConfig, match="those of the outputs"):
            batch(dataset.rename_columns({"number": "error"}), "demo", PARAMS)
        with pytest.raises(InvalidSamplingParams, match="a row has one"):
            batch(dataset, "demo", SamplingParams(n=2))
    own = Completer(read_config("demo", OPTIONS), PARAMS)
    want = own.complete([row["prompt"] for row in ROWS], [None] * len(ROWS))
    got = [{name: None if row[name] is None else row[name] for name in want[0]} for row in found]
    assert [row["number"] for row in found] == list(range(len(ROWS)))
    assert [row["error"] is None for row in got] == [bool(row["prompt"]) for row in ROWS]
    for own_row, other in zip(got, want, strict=True):
        tokens = own_row["token_ids"]
        assert own_row | {"token_ids": None if tokens is None else list(tokens)} == other
