"""The transformers backend: a decoder that has no family here is computed by the modules of the package transformers, on the
paged KV cache, the attention backends and the products of this engine.

Nothing lists architectures. A model is described by running it once, with an attention that writes down how it is called.
"""
