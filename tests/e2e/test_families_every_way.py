"""Every family, run in ways that are drawn: policy, sizes, kernels, depth, tiers. Each request gets the tokens it gets alone."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_engine import late_device, open_llm
from tests.e2e.test_every_way_of_running import MAX_LEN, NUM_REQUESTS, REQUESTS, draw_engine, run
from tests.e2e.test_windows_every_way import groups_of
from tests.models.families import SHAPES, family_checkpoint
from tests.support import fill_kv_with_nan

DRAWN = 16


def drawn_shapes() -> list[str]:
    """At least one of each family, and others."""
    shapes = list(SHAPES)
    random.Random(0).shuffle(shapes)
    first = {SHAPES[shape][0]: shape for shape in reversed(shapes)}
    return [*first.values(), *(shape for shape in shapes if shape not in first.values())][:DRAWN]


@pytest.mark.parametrize(("number", "shape"), list(enumerate(drawn_shapes())))
def test_tokens_are_those_that_each_gets_alone(tmp_path: Path, number: int, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, seed=number)
    options = draw_engine(100 + number)
    options["num_kv_blocks"] *= len(groups_of(folder, options["block_size"], 1))  # each takes blocks of its own
    options["quantization"] = (None, "int8", "int4", "int4-128")[number % 4]
    chosen = random.Random(number).sample(range(NUM_REQUESTS), 6)
    requests = [REQUESTS[i] for i in chosen]
    bare: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False}
    bare |= {name: options[name] for name in ("kernels", "kv_cache_dtype", "quantization")}
    with open_llm(folder, max_model_len=MAX_LEN, num_kv_blocks=200, **bare) as llm:
        alone = [run(llm, [request])[0] for request in requests]
    with ExitStack() as stack:
        if number % 3 == 2:
            stack.enter_context(late_device(can_record=number % 2 > 0, seed=number))
        llm = stack.enter_context(open_llm(folder, max_model_len=MAX_LEN, **options))
        fill_kv_with_nan(llm)
        assert run(llm, requests) == alone
        assert run(llm, requests[::-1]) == alone[::-1], "with what the first time has left in the cache"


def test_every_family_is_drawn() -> None:
    assert {SHAPES[shape][0] for shape in drawn_shapes()} == {family for family, _ in SHAPES.values()}
