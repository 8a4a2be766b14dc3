"""Models, requests and ways to run them are drawn, and a group computes: each request gets what it gets alone, on one device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from nanoengine.models import capability as models
from nanoengine.scale.parallel.capability import REFUSED
from tests.e2e.drawn_models import MAX_LEN, REASON, checkpoint, draw_model, in_q4_k, opened
from tests.e2e.drawn_requests import draw_request, make_requests, run
from tests.e2e.one_number import (
    Case,
    check_resumed,
    check_sent_again,
    check_together,
    draw_way,
    give_adapters,
    least_blocks,
    note,
    teach,
)
from tests.models.families import WITH_STATES
from tests.scale.parallel.groups import let_group_compute, open_group
from tests.support import threads

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
SEEDS = (6, 12, 13)
"""Of the first 24, all of which pass: those that take least time and in which everything below happens."""

SEEDS_WITH_STATES = (48, 50)
"""Of the first 55, all of which pass, chosen alike."""


def check_group(seed: int, folder: Path, seen: Counter[str], *, has_states: bool) -> None:
    rng = random.Random(f"group {seed}")
    model = draw_model(rng)
    while not model.is_exact or (model.shape in WITH_STATES) is not has_states:
        model = draw_model(rng)
    requests = [draw_request(rng, model) for _ in range(5)]
    with checkpoint(folder / "model", model) as path, threads(1):
        with opened(model, path, enforce_eager=True, num_threads=1, num_kv_blocks=800, max_num_seqs=3) as llm:
            config = llm.built.models.model_config
            heads = min(config.num_heads, (config.states and config.states.num_heads) or 4)
            requests = give_adapters(llm, requests, folder / "adapters", seed)
            made = make_requests(llm, requests)
            case = Case(model, path, requests, [], made, [run(llm, [request])[0] for request in made], [])
        size = rng.randint(2, min(4, heads))
        drawn = {name: value for name, value in draw_way(rng, model, folder).items() if name not in REFUSED}
        options = drawn | {"enforce_eager": True, "num_threads": 1}
        options["num_kv_blocks"] = least_blocks(path, options) + rng.choice([3, 100])
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            if model.q4_k:
                patch.setattr(models, "quantizer", lambda *_: in_q4_k)
            given = {"max_model_len": MAX_LEN, "enable_lora": True, **model.options, **options}
            llm = let_group_compute(stack.enter_context(open_group(size, path, **given)))
            if options["speculation"]:
                teach(llm, case, rng)
            check_together(llm, case, rng)
            check_sent_again(llm, case, seen)
            check_resumed(llm, case, rng, seen)
            note(seen, llm)
            if (snapshots := llm.built.capabilities["kv_groups"].snapshots) is not None:
                seen.update(snapshots=snapshots.num_stored, restored=snapshots.num_restored)
        seen[f"{size} ranks"] += 1


@pytest.mark.parametrize(("seeds", "has_states"), [(SEEDS, False), (SEEDS_WITH_STATES, True)])
def test_what_a_group_says_has_the_bits_of_one_device(tmp_path: Path, seeds: Iterable[int], has_states: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        (folder := tmp_path / str(seed)).mkdir()
        check_group(seed, folder, seen, has_states=has_states)
    of_states = ("snapshots", "restored") if has_states else ()
    for happened in ("sent again", "resumed", "hits", "preemptions", "accepted", "rejected", *of_states):
        assert seen[happened] > 0, happened
