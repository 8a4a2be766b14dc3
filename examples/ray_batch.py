"""Batch inference with Ray Data: a dataset of prompts becomes a dataset of texts.

python examples/ray_batch.py            (pip install 'nanoengine[ray]' 'ray[data]')

Ray Data computes a batch again when its actor is lost. A token depends on weights, prompt, parameters and seed alone: if the seed
of a row depends on the row alone, the texts are the same then.
"""

import sys
from typing import Any

from nanoengine import LLM, SamplingParams

try:
    import ray.data
except ImportError:
    sys.exit("This example needs ray and ray.data: pip install 'nanoengine[ray]' 'ray[data]'")


class Completer:
    """An engine in an actor, which is given one batch after the other."""

    def __init__(self) -> None:
        self.llm = LLM("demo", num_threads=1, max_model_len=512, use_tqdm=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        seeds = map(int, batch["number"])
        params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=24, stop="\n\n") for seed in seeds]
        outputs = self.llm.generate(list(batch["prompt"]), params, use_tqdm=False)
        return {**batch, "text": [output.outputs[0].text for output in outputs]}


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)  # on many machines: ray.init("auto")
ray.data.DataContext.get_current().execution_options.preserve_order = True
names = ["binary_search", "fibonacci", "quick_sort", "read_config", "merge"]
dataset = ray.data.from_items([{"number": number, "prompt": f"def {name}("} for number, name in enumerate(names)])
completed = dataset.map_batches(Completer, batch_size=256, concurrency=1, num_cpus=1)  # concurrency: engines
for row in completed.iter_rows():
    print(f"{row['number']}: {row['prompt'] + row['text']!r}")
ray.shutdown()
