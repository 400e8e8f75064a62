"""The arguments of the offline calls: `Engine.generate`, `chat` and `beam_search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checks import is_integer, refusal, scalar, shown, told


def as_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, made of one prompt or of a list of prompts.

    A text, a mapping, a list of token ids and a one-dimensional array of them are each one prompt. A two-dimensional
    array is one prompt per row, and an empty list is no prompt. Examples: "Hi" gives ["Hi"], [5, 7] gives [[5, 7]], and
    ["Hi", [5, 7]] is returned as a list of two prompts. A mapping whose `prompt_token_ids` are an array [B, P] holds B
    padded prompts; see `unpadded`. The prompts themselves are not checked. Raise InvalidRequestError for a value that
    is neither a prompt nor a list, and for a mask or lengths that do not fit.
    """
    if isinstance(prompts, Mapping) and (
        getattr(prompts.get("prompt_token_ids"), "ndim", 0) == 2 or not prompts.keys().isdisjoint(("mask", "lengths"))
    ):
        return unpadded(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if _is_array(prompts):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise refusal("prompts", type(prompts).__name__, "a prompt or a list of prompts")
    if not prompts:
        return []
    # A list of integers is one prompt of token ids; any other list has prompts as its elements.
    return [list(prompts)] if is_integer(scalar(prompts[0])) else list(prompts)


def unpadded(prompts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return B prompts without their padding, made of one mapping with `prompt_token_ids` [B, P].

    `mask` [B, P] says where there is a token: one run in each row, so that rows may be padded in front or at their
    ends. `lengths` [B] are the tokens of rows that are padded at their ends. Without either, each row is a prompt of P
    tokens. What else the mapping holds, such as `cache_salt`, goes to every prompt. Raise InvalidRequestError for both
    at once, for another shape, for a row without a token, and for a mask with holes.
    """
    way_out = "give lengths, or a mask with one run of tokens in each row"
    ids: Any = prompts.get("prompt_token_ids")
    mask, lengths = prompts.get("mask"), prompts.get("lengths")
    if not _is_array(ids) or ids.ndim != 2 or not ids.shape[1]:
        raise refusal("prompt_token_ids", shown(ids), "an array [B, P], P at least 1, beside a mask or lengths")
    ids = np.asarray(ids)
    if mask is not None and lengths is not None:
        raise refusal("prompts", "a mask and lengths", "one of them")
    if lengths is not None:
        counts = as_array("lengths", lengths)
        if counts.shape != ids.shape[:1] or not np.issubdtype(counts.dtype, np.integer):
            raise refusal("lengths", f"{counts.dtype} {list(counts.shape)}", f"integers [{len(ids)}], one a row")
        if outside := [int(count) for count in counts if not 1 <= count <= ids.shape[1]]:
            raise refusal("lengths", outside[0], f"1 to {ids.shape[1]}, the columns of prompt_token_ids")
        mask = np.arange(ids.shape[1]) < counts[:, None]
    is_token = np.ones(ids.shape, bool) if mask is None else as_array("mask", mask)
    if is_token.shape != ids.shape:
        raise refusal("mask", f"the shape {list(is_token.shape)}", f"{list(ids.shape)}, that of prompt_token_ids")
    if not np.isin(is_token, (0, 1)).all():
        raise refusal("mask", "other numbers than 0 and 1", "booleans", way_out)
    is_token = is_token.astype(bool)
    others = {name: value for name, value in prompts.items() if name not in ("prompt_token_ids", "mask", "lengths")}
    rows = []
    for index, (row, is_in_row) in enumerate(zip(ids, is_token, strict=True)):
        places = np.flatnonzero(is_in_row)
        if not len(places) or places[-1] - places[0] + 1 > len(places):
            raise refusal("mask", f"row {index} {'with holes' if len(places) else 'without a token'}", "a run", way_out)
        rows.append({**others, "prompt_token_ids": row[places]})
    return rows


def as_sequences(ids: Any) -> tuple[list[list[int]], bool]:
    """Return a list of lists of token ids, and whether `ids` was a single sequence, not a list of sequences.

    A sequence is a list, a tuple or an array of integers; an array [B, N] is B sequences of N ids. Examples: [5, 7]
    gives ([[5, 7]], True), and [[5], [7, 9]] gives ([[5], [7, 9]], False). The values of the ids are checked later.
    Raise InvalidRequestError for anything else, for no sequence, and for an empty sequence.
    """
    allowed = "a list or an array of token ids, or a list of such"
    if isinstance(ids, str | Mapping) or not (isinstance(ids, Sequence) or _is_array(ids)):
        way_out = "give each row without its padding, as a list" if isinstance(ids, Mapping) else ""
        raise refusal("ids", told(ids), allowed, way_out)
    if _is_array(ids):
        ids = np.asarray(ids).tolist()
    is_one = bool(ids) and is_integer(scalar(ids[0]))
    sequences = [_as_ids(one) for one in ([ids] if is_one else ids)]
    if not sequences or not all(one and all(map(is_integer, one)) for one in sequences):
        raise refusal("ids", told(ids), allowed)
    return sequences, is_one


def _as_ids(value: Any) -> list[Any]:
    """Return the elements of a list, a tuple or an array, scalars of numpy and JAX as numbers; nothing of others."""
    items = np.asarray(value).tolist() if _is_array(value) else value
    return list(map(scalar, items)) if isinstance(items, list | tuple) else []


def as_array(name: str, value: Any) -> np.ndarray:
    """Return a caller's value as an array of numpy; raise InvalidRequestError if its rows have different lengths."""
    try:
        return np.asarray(value)
    except ValueError as error:
        raise refusal(name, told(value), "an array, or lists of one length") from error


def as_conversations(messages: Any) -> list[Any]:
    """Return a list of conversations, made of one conversation or of a list of conversations.

    A conversation is a list of messages, and a message is a mapping. Only the first element is looked at: if it is a
    mapping, the list is one conversation. The messages are checked later. Raise InvalidRequestError for an empty list,
    and for a value that is no list.
    """
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence) or not messages:
        raise refusal("messages", told(messages), "a list of {role, content}, or a list of such lists")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def one_for_each(values: Any, num_prompts: int, name: str, kind: Any, kind_name: str) -> list[Any]:
    """Return a list with one value per prompt.

    If `values` is an instance of `kind`, a type or a union of types, it is one value for all prompts. Otherwise it must
    be a list with one value per prompt, whose elements are not checked here. Example: 3 for 2 prompts gives [3, 3].

    Raise InvalidRequestError for a list of another length and for a value that is no list. `name` and `kind_name` are
    the words for the argument and for the type in the message.
    """
    if isinstance(values, kind):
        return [values] * num_prompts
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise refusal(name, told(values), f"{kind_name} or a list of them")
    if len(values) != num_prompts:
        raise refusal(name, f"{len(values)} for {num_prompts} prompts", "one for all or one for each")
    return list(values)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy or of JAX, which is not imported for that."""
    return isinstance(value, np.ndarray) or (hasattr(value, "ndim") and hasattr(value, "sharding"))
