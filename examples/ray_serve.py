"""The server behind Ray Serve, and its engines where the cluster has room for them.

python examples/ray_serve.py            (pip install 'nanoengine[ray]'; or: serve run examples.ray_serve:app)
"""

import json
import sys
import urllib.request

from nanoengine.scale.ray import deployment

try:
    import ray
    from ray import serve
except ImportError:
    sys.exit("This example needs ray: pip install 'nanoengine[ray]'")

app = deployment("demo", replicas=2, ray_cpus=1, max_model_len=512)

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)  # on many machines: ray.init("auto")
    serve.run(app, name="nanoengine")
    body = {"model": "demo", "prompt": "def binary_search(", "max_tokens": 40, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        print(body["prompt"] + json.load(answer)["choices"][0]["text"])
    serve.shutdown()
    ray.shutdown()
