"""The models that /v1/models lists: one model, under each of its names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model under one of its names."""

    name: str
    created: int
    """When the server was started, in seconds since 1970."""
    root: str
    """What the server was told to serve, which all names share."""
    max_model_len: int


def openai_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in OpenAI's words, with vLLM's further fields."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jpaged",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
