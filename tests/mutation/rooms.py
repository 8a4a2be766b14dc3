"""All mutants, by the part of the engine that they break."""

from __future__ import annotations

from tests.mutation import (
    attention,
    front,
    gguf,
    kernels,
    kv,
    kv_offload,
    lora,
    models,
    parallel,
    policy,
    pooling,
    quantization,
    ray,
    replicas,
    request,
    runner,
    sampling,
    server,
    speculation,
    states,
    structured,
    worker,
)
from tests.mutation.mutant import Mutant

ROOMS: dict[str, tuple[Mutant, ...]] = {
    "policy": policy.MUTANTS,
    "kv": kv.MUTANTS,
    "states": states.MUTANTS,
    "kv_offload": kv_offload.MUTANTS,
    "speculation": speculation.MUTANTS,
    "request": request.MUTANTS,
    "runner": runner.MUTANTS,
    "sampling": sampling.MUTANTS,
    "attention": attention.MUTANTS,
    "kernels": kernels.MUTANTS,
    "models": models.MUTANTS,
    "gguf": gguf.MUTANTS,
    "quantization": quantization.MUTANTS,
    "ray": ray.MUTANTS,
    "replicas": replicas.MUTANTS,
    "server": server.MUTANTS,
    "front": front.MUTANTS,
    "structured": structured.MUTANTS,
    "pooling": pooling.MUTANTS,
    "lora": lora.MUTANTS,
    "worker": worker.MUTANTS,
    "parallel": parallel.MUTANTS,
}
