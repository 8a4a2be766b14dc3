"""Fill in the middle: how long an editor waits for the first token while somebody types, with the prefix cache and without.

python -m benchmarks.infill MODEL
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from nanoengine import LLM, SamplingParams
from nanoengine.models.fill_in_middle import FillTokens, fill_tokens


def typing_seconds(llm: LLM, marks: FillTokens) -> float:
    """The median time to the first token behind each letter that is typed below 100 lines of a file and above 20 others."""
    lines = Path(__file__).read_text().splitlines(keepends=True) * 4
    prefix, suffix, typed = "".join(lines[:100]), "".join(lines[100:120]), "def middle_of(before, behind):\n    return "
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds = []
    for end in range(20):
        start = time.perf_counter()
        llm.generate([marks.prompt(prefix + typed[:end], suffix)], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main(model: str) -> None:
    for caching in (True, False):
        with LLM(model, max_model_len=8192, enable_prefix_caching=caching) as llm:
            milliseconds = 1000 * typing_seconds(llm, fill_tokens(llm.tokenizer))
            print(f"first token while typing, prefix cache {caching}: {milliseconds:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
