"""Models as Anthropic's /v1/models lists them, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ....checks import check, check_name, one_of, refusal, told
from ..served_model import ServedModel

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
"""Models of a page, as Anthropic has it."""


def anthropic_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in Anthropic's words."""
    created_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created_at,
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def anthropic_models(models: Sequence[ServedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of the models that a query asks for by `limit`, and by `after_id` or `before_id`.

    Raise InvalidRequestError for another parameter, a wrong value, and an id that no model has.
    """
    for name in query:
        check_name(name, ("limit", "after_id", "before_id"), "query parameter")
    if "after_id" in query and "before_id" in query:
        raise refusal("after_id", "it and before_id", "one of them", "leave one out")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_LIMIT):
        raise refusal("limit", told(limit), f"an integer in [1, {MAX_LIMIT}]")
    names, first, end = [model.name for model in models], 0, len(models)
    if "after_id" in query:
        first = names.index(check("after_id", query["after_id"], one_of(*names))) + 1
        end = min(end, first + int(limit))
        has_more = end < len(models)
    elif "before_id" in query:
        end = names.index(check("before_id", query["before_id"], one_of(*names)))
        first = max(0, end - int(limit))
        has_more = first > 0
    else:
        end = min(end, int(limit))
        has_more = end < len(models)
    page = models[first:end]
    return {
        "data": [anthropic_model(model) for model in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }
