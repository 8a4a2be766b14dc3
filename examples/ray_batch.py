"""Batch inference on a Ray cluster: a dataset of prompts becomes a dataset of outputs.

python examples/ray_batch.py            (pip install 'nanoengine[ray]')
"""

import sys

from nanoengine import SamplingParams
from nanoengine.ray import batch

try:
    import ray
except ImportError:
    sys.exit("This example needs ray: pip install 'nanoengine[ray]'")

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)  # on many machines: ray.init("auto")
names = ["binary_search", "fibonacci", "quick_sort", "read_config", "", "merge"]
dataset = ray.data.from_items([{"number": n, "prompt": f"def {name}(" if name else ""} for n, name in enumerate(names)])

params = SamplingParams(temperature=0.7, max_tokens=24, stop="\n\n")
outputs = batch(dataset, "demo", params, replicas=1, max_model_len=512)
for row in outputs.iter_rows():  # in the order of the prompts, whichever engine was first
    print(f"{row['number']}: {row['error'] or row['prompt'] + row['text']!r}")
ray.shutdown()
