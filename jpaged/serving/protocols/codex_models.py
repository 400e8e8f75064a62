"""Models as Codex reads them: in the list `models` beside OpenAI's `data` of /v1/models, or saved as a file.

Without an entry for its model Codex takes fallbacks: a long prompt, no tool that edits files, and a guess at the
context. The field names are those of Codex's `model_catalog_json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .served_model import ServedModel, openai_model

BASE_INSTRUCTIONS = """\
You are a coding assistant that works in the user's folder with the tools that you are given. Look at what is there \
before you change it. Keep changes small and in the style of the code around them, and check that they work. End with \
a few sentences on what you have done."""
MAX_OUTPUT_SHARE = 4
"""One output of a tool may fill so large a part of the context: 1 / 4."""
MAX_OUTPUT_TOKENS = 10_000
"""Tokens of one output of a tool that Codex shows at most, as it has it for its own models."""


def codex_model(model: ServedModel) -> dict[str, Any]:
    """Return a model with all fields that Codex requires, and those that differ from its fallbacks."""
    limit = min(MAX_OUTPUT_TOKENS, model.max_model_len // MAX_OUTPUT_SHARE)
    return {
        "slug": model.name,
        "display_name": model.name,
        "base_instructions": BASE_INSTRUCTIONS,
        "context_window": model.max_model_len,
        "truncation_policy": {"mode": "tokens", "limit": limit},
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "supported_in_api": True,
        "visibility": "list",
        "priority": 1,
    }


def openai_models(models: Sequence[ServedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the list of models in OpenAI's words, which knows no pages, with Codex's list beside it."""
    listed = {"object": "list", "data": [openai_model(model) for model in models]}
    return {**listed, "models": [codex_model(model) for model in models]}
