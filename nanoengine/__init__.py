"""nanoengine: a minimal, complete LLM inference engine.

from nanoengine import LLM, SamplingParams

with LLM("demo") as llm:
    for output in llm.generate(["def binary_search("], SamplingParams(max_tokens=100)):
        print(output.outputs[0].text)
"""

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoengine.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"]
