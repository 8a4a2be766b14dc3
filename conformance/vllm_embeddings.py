"""What vLLM's tests of embeddings compare with: transformers with the same file, and the shapes of answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pydantic
import torch

Vectors = list[list[float]]


class Reference:
    """The last token's state of each text, normalized, by transformers in float32."""

    def __init__(self, *_: Any, **__: Any) -> None:
        from transformers import AutoModel, AutoTokenizer

        file = Path(os.environ["MODEL_FILE"])
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.tokenizer = AutoTokenizer.from_pretrained(**where)
        self.model = AutoModel.from_pretrained(**where, dtype=torch.float32).eval()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> torch.Tensor:
        states = [self.model(**self.tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts]
        return torch.nn.functional.normalize(torch.stack(states), dim=-1)


class Answer(pydantic.BaseModel):
    """Some JSON."""

    model_config = pydantic.ConfigDict(extra="allow")


class Usage(Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Embedding(Answer):
    index: int
    object: str
    embedding: list[float] | str


class EmbeddingResponse(Answer):
    id: str
    object: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


def float_embeddings(answer: Any) -> Vectors:
    return [own.embedding for own in answer.data]


def run_embedding_correctness_test(
    reference: Reference, texts: list[str], found: Vectors, dimensions: int | None = None
) -> None:
    expected = torch.nn.functional.normalize(reference.encode(texts)[:, :dimensions], dim=-1)
    check_embeddings_close(embeddings_0_lst=expected.tolist(), embeddings_1_lst=found)


def check_embeddings_close(*, embeddings_0_lst: Any, embeddings_1_lst: Any, **_: Any) -> None:
    """By their cosine, as vLLM does: one of the models has rounded its activations to 8 bits."""
    one, other = torch.tensor(embeddings_0_lst), torch.tensor(embeddings_1_lst)
    assert one.shape == other.shape
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 1 - 1e-3
