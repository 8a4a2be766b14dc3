"""Many prompts behind one long beginning: the engine computes it once, and every later request finds it in the prefix cache.

python examples/shared_prefix.py
"""

import inspect
import textwrap

from nanoengine import LLM, SamplingParams

# A long beginning, such as a system prompt would be: the source of a module of the standard library.
shared = inspect.getsource(textwrap)[:6000]
endings = ["\n\ndef center(", "\n\ndef justify(", "\n\nclass Hyphenator", "\n\ndef strip_margin(", "\n\nif __name__"]
prompts = [shared + ending for ending in endings]
sampling_params = SamplingParams(temperature=0, max_tokens=40, stop="\n\n")

for caching in (False, True):
    with LLM("demo", enable_prefix_caching=caching, use_tqdm=False) as llm:
        # The first step already shares: blocks that one sequence of a step computes can be hit by the next one.
        outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        slowest = max(output.metrics.ttft or 0.0 for output in outputs)
        print(
            f"prefix caching {'on ' if caching else 'off'}: {num_prompt_tokens} prompt tokens, {num_cached_tokens} from the "
            f"cache, last first token after {slowest * 1000:.0f} ms"
        )

for ending, output in zip(endings, outputs, strict=True):
    print(f"\n=== ...{ending.strip()}\n{ending.strip()}{output.outputs[0].text}")
