"""Many streams on one event loop: the engine works in a thread of its own, and each stream awaits what its steps bring."""

import asyncio

from nanoengine import SamplingParams
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine

PROMPTS = ["def push(self, item):\n", "import json\n", "class Queue:\n", "for line in "]


async def complete(engine: AsyncLLMEngine, prompt: str) -> str:
    text = ""
    async for delta in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=32)):
        text += delta.text
    return text


async def first_line(engine: AsyncLLMEngine, prompt: str) -> str:
    """Leaving the loop early aborts the request: the rest is never computed."""
    text = ""
    stream = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1000))
    async for delta in stream:
        text += delta.text
        if "\n" in text.strip():
            break
    await stream.aclose()
    return text.strip().split("\n")[0]


async def main() -> None:
    engine = AsyncLLMEngine.from_model("demo", scheduling_policy="mixed")
    try:
        for prompt, text in zip(PROMPTS, await asyncio.gather(*(complete(engine, p) for p in PROMPTS)), strict=True):
            print(f"--- {prompt!r}\n{text}")
        print("--- only one line of it:", await first_line(engine, "def pop(self):\n"))
        metrics = await engine.call(engine.built.metrics.snapshot)
        print(f"{metrics.num_requests} requests, {metrics.steps.decode_tokens} tokens, {metrics.finished}")
    finally:
        engine.close()


if __name__ == "__main__":
    asyncio.run(main())
