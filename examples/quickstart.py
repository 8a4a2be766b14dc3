"""The ten lines that most people need: complete a few prompts in one batch. Runs on any machine: python examples/quickstart.py"""

from nanoengine import LLM, SamplingParams

prompts = ["def binary_search(", "class Queue:\n", "with open(filename"]
sampling_params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=80, seed=0)

with LLM("demo") as llm:
    for output in llm.generate(prompts, sampling_params):
        completion = output.outputs[0]
        print(f"\n=== {output.prompt!r} ({completion.finish_reason}, {len(completion.token_ids)} tokens)")
        print(f"{output.prompt}{completion.text}")
