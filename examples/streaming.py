"""Text as it comes: print a completion piece by piece, and a second one of the same seed to see that it repeats itself.

python examples/streaming.py
"""

from nanoengine import LLM, SamplingParams

prompt = "def parse_date(text):\n"
sampling_params = SamplingParams(temperature=0.6, max_tokens=120, seed=7, stop="\n\n\n")

with LLM("demo") as llm:
    print(prompt, end="")
    pieces = []
    for piece in llm.stream(prompt, sampling_params):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()

    again = llm.generate(prompt, sampling_params, use_tqdm=False)[0]
    assert "".join(pieces) == again.outputs[0].text
    ttft, tpot = again.metrics.ttft or 0.0, again.metrics.tpot or 0.0
    print(f"\nThe same again, not streamed: equal. TTFT {1000 * ttft:.1f} ms, TPOT {1000 * tpot:.2f} ms")
