"""The transformers backend: modules of the package transformers compute a decoder without a family, on the paged KV cache, the
attention backends and the products of this engine.

There is no list of architectures: a probe runs a model once with an attention that records its calls.
"""
