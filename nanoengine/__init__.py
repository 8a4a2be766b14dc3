"""nanoengine: a minimal, complete LLM inference engine.

from nanoengine import LLM, SamplingParams

with LLM("demo") as llm:
    for output in llm.generate(["def binary_search("], SamplingParams(max_tokens=100)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Threads of torch spin while they wait, also for a thread whose CPU is busy with another process. So few iterations cost nothing
# where the CPUs are free. OpenMP reads this when torch is imported, so it is set before all imports.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from nanoengine.core.outputs import CompletionOutput as CompletionOutput
    from nanoengine.core.outputs import RequestOutput as RequestOutput
    from nanoengine.features.beam_search.params import BeamSearchParams as BeamSearchParams
    from nanoengine.features.lora.request import LoRARequest as LoRARequest
    from nanoengine.features.observability.metrics import RequestMetrics as RequestMetrics
    from nanoengine.features.pooling.params import PoolingParams as PoolingParams
    from nanoengine.features.sampling.params import SamplingParams as SamplingParams
    from nanoengine.features.structured.params import StructuredOutputs as StructuredOutputs
    from nanoengine.features.structured.params import StructuredOutputsParams as StructuredOutputsParams
    from nanoengine.llm import LLM as LLM
    from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine

__version__ = "0.1.0"

_MODULES = {
    "LLM": "nanoengine.llm",
    "LoRARequest": "nanoengine.features.lora.request",
    "AsyncLLMEngine": "nanoengine.serve.aio.async_llm_engine",
    "BeamSearchParams": "nanoengine.features.beam_search.params",
    "CompletionOutput": "nanoengine.core.outputs",
    "PoolingParams": "nanoengine.features.pooling.params",
    "RequestMetrics": "nanoengine.features.observability.metrics",
    "RequestOutput": "nanoengine.core.outputs",
    "SamplingParams": "nanoengine.features.sampling.params",
    "StructuredOutputs": "nanoengine.features.structured.params",
    "StructuredOutputsParams": "nanoengine.features.structured.params",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: a folder of the package may be deleted, and the rest works.

    Raises:
        InvalidConfig: the folder was deleted.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError:
        from nanoengine.builder import is_installed, not_installed

        folder = _MODULES[name].split(".")[-2]
        if folder == "nanoengine" or is_installed(folder):
            raise
        raise not_installed(folder) from None
