"""Measure the demo model on the held-out modules: bits per byte beside `xz -9e`.

    python -m benchmarks.demo_model.measure [--model DIR] [--corpus DIR]

Each held-out module is a document of its own after the end-of-text token.  A document longer than the model's
context is read in windows of 4096 tokens that overlap by 1024: a window scores only the tokens that no earlier
window scored, so every token but a document's first thousand is predicted from at least 1024 tokens before it.
The weights are the bfloat16 ones on disk; the arithmetic is float32.  xz gets all modules joined into one string.
"""

import argparse
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from benchmarks.demo_model import corpus
from nanoengine.models.names import DEMO

WINDOW = 4096
OVERLAP = 1024


def windows(count: int, length: int = WINDOW, overlap: int = OVERLAP) -> Iterator[tuple[int, int, int]]:
    """Cut `count` tokens into `(start, stop, first)`: read start to stop, score the tokens from `first` on."""
    start, first = 0, 1
    while first < count:
        stop = min(start + length, count)
        yield start, stop, first
        start, first = stop - overlap, stop


@torch.no_grad()
def document_bits(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """The bits the model needs for `tokens` after their first, which is the end-of-text token."""
    length = min(WINDOW, model.config.max_position_embeddings)
    total = 0.0
    for start, stop, first in windows(len(tokens), length, length // 4):
        piece = tokens[start:stop].to(model.device, torch.long)
        logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
        fresh = slice(first - start - 1, None)
        total += functional.cross_entropy(logits[fresh].float(), piece[1:][fresh], reduction="sum").item()
    return total / math.log(2)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="bits per byte of the demo model on the held-out modules")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--corpus", type=Path, default=corpus.standard_library())
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    listed = (options.model / "heldout.txt").read_text().split()  # other Pythons would split otherwise
    documents = [d for d in corpus.read_documents(options.corpus) if d.path in listed]
    began, bits, size, count = time.monotonic(), 0.0, 0, 0
    for document in documents:
        ids = tokenizer.encode(document.text, verbose=False)
        own = document_bits(model, torch.tensor([tokenizer.eos_token_id, *ids]))
        own_size = len(document.text.encode())
        print(f"  {document.path:<24} {own_size:>7} bytes {own / own_size:6.3f}", flush=True)
        bits, size, count = bits + own, size + own_size, count + len(ids)
    packed = len(lzma.compress("".join(d.text for d in documents).encode(), preset=9 | lzma.PRESET_EXTREME))
    seconds = time.monotonic() - began
    print(f"held out: {len(documents)} of {len(listed)} modules, {size} bytes, {count} tokens, {seconds:.0f} s")
    print(f"demo model: {bits / size:.3f} bits per byte")
    print(f"xz -9e:     {8 * packed / size:.3f} bits per byte")


if __name__ == "__main__":
    main()
