"""Decode steps of few streams with quantized weights, beside those of the same model as it is.

    python -m benchmarks.gpu.engine --parts quantized --random-weights qwen3-0.6b

`limit_share` compares with the time in which weights that are not quantized could be read: with others it may be above 1.
"""

from __future__ import annotations

import argparse

from benchmarks.gpu.decode import decode_steps
from benchmarks.gpu.modes import modes_of, running_in
from benchmarks.gpu.parts import Bench
from benchmarks.session import open_session
from nanoengine.errors import InvalidConfig
from nanoengine.models.options import QUANTIZATIONS

STREAMS = (1, 16)


def quantized(bench: Bench) -> None:
    """An engine for each format, one after the other."""
    for name in (None, *QUANTIZATIONS):
        options = [*bench.args.option, *([] if name is None else [("quantization", name)])]
        args = argparse.Namespace(**vars(bench.args) | {"option": options})
        try:
            with open_session(args, bench.report, bench.longest) as session:
                fastest = modes_of(session.llm)[0]
                case = {"work": "quantized decode", "quantization": name or "none", "mode": str(fastest)}
                for streams in STREAMS:
                    with running_in(session.llm, fastest):
                        decode_steps(bench, session, streams, case)
        except InvalidConfig as error:
            bench.report.warn(f"left out: {name}: {error}")
