"""The process that `startup` measures: it imports an engine, loads a model, makes one token, and says when. The "engine" floor
only imports torch and reads the weights.

    python -m benchmarks.first_token ENGINE MODEL INPUT_LEN OPTIONS START

START is `time.monotonic()` of the parent as it starts this process: on Linux and macOS all processes share that clock.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def weight_files(path: Path) -> list[Path]:
    """Of the model at a path that `find_model` gave."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def nanoengine(model: str, prompt: list[int], options: dict[str, Any], note: Callable[[str], None]) -> None:
    from nanoengine import LLM, SamplingParams

    note("import_s")
    with LLM(model, use_tqdm=False, **options) as llm:
        note("ready_s")
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        note("first_token_s")


def floor(model: str, _: list[int], __: dict[str, Any], note: Callable[[str], None]) -> None:
    import torch  # noqa: F401

    note("import_s")
    buffer = bytearray(16 << 20)
    for path in weight_files(Path(model)):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    note("weights_read_s")


def transformers(model: str, prompt: list[int], options: dict[str, Any], note: Callable[[str], None]) -> None:
    import torch

    from benchmarks.peers import load_in_transformers
    from nanoengine.models.names import find_model

    note("import_s")
    device = options["device"] if options["device"] != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = load_in_transformers(find_model(model), options["dtype"]).to(device)
    note("ready_s")
    ids = torch.tensor([prompt], device=device)
    loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
    note("first_token_s")


def main(engine: str, model: str, input_len: str, options: str, start: str) -> None:
    figures: dict[str, float] = {}

    def note(name: str) -> None:
        figures[name] = time.monotonic() - float(start)

    {"floor": floor, "nanoengine": nanoengine, "transformers": transformers}[engine](
        model, list(range(1, int(input_len) + 1)), json.loads(options), note
    )
    figures["cpu_s"] = time.process_time()
    from benchmarks.machine import peak_memory_bytes

    print(json.dumps(figures | {"peak_memory_mb": peak_memory_bytes() / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
