"""nanoengine: a minimal, complete LLM inference engine.

from nanoengine import LLM, SamplingParams

with LLM("demo") as llm:
    for output in llm.generate(["def binary_search("], SamplingParams(max_tokens=100)):
        print(output.outputs[0].text)
"""

import os
import sys

# Threads of torch spin while they wait, also for one whose CPU a busy process has. So few turns cost nothing where the CPUs are
# free. OpenMP reads this when torch is imported, so it stands before all imports.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoengine.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"]
