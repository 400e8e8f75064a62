"""The arguments and the progress bar of the offline calls: `Engine.generate`, `chat` and `beam_search`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from ..checks import is_integer, refusal, shown


def as_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, made of one prompt or of a list of prompts.

    A text, a mapping, a list of token ids and a one-dimensional array of them are each one prompt. A two-dimensional
    array is one prompt per row, and an empty list is no prompt. Examples: "Hi" gives ["Hi"], [5, 7] gives [[5, 7]], and
    ["Hi", [5, 7]] is returned as a list of two prompts. The prompts themselves are not checked. Raise
    InvalidRequestError for a value that is neither a prompt nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if _is_array(prompts):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise refusal("prompts", type(prompts).__name__, "a prompt or a list of prompts")
    if not prompts:
        return []
    # A list of integers is one prompt of token ids; any other list has prompts as its elements.
    return [list(prompts)] if is_integer(prompts[0]) else list(prompts)


def as_sequences(token_ids: Any) -> tuple[list[list[int]], bool]:
    """Return a list of lists of token ids, and whether `token_ids` was a single sequence, not a list of sequences.

    A sequence is a list, a tuple or an array of integers; an array [B, N] is B sequences of N ids. Examples: [5, 7]
    gives ([[5, 7]], True), and [[5], [7, 9]] gives ([[5], [7, 9]], False). The values of the ids are checked later.
    Raise InvalidRequestError for anything else, for no sequence, and for an empty sequence.
    """
    allowed = "a list or an array of token ids, or a list of such"
    if isinstance(token_ids, str | Mapping) or not (isinstance(token_ids, Sequence) or _is_array(token_ids)):
        raise refusal("token_ids", shown(token_ids), allowed)
    if _is_array(token_ids):
        token_ids = np.asarray(token_ids).tolist()
    is_one = bool(token_ids) and is_integer(token_ids[0])
    # `tolist` makes Python integers of numpy's. A scalar does not become a list, and is refused below.
    sequences = [np.asarray(one).tolist() for one in ([token_ids] if is_one else token_ids)]
    if not sequences or not all(isinstance(one, list) and one and all(map(is_integer, one)) for one in sequences):
        raise refusal("token_ids", shown(token_ids), allowed)
    return sequences, is_one


def as_conversations(messages: Any) -> list[Any]:
    """Return a list of conversations, made of one conversation or of a list of conversations.

    A conversation is a list of messages, and a message is a mapping. Only the first element is looked at: if it is a
    mapping, the list is one conversation. The messages are checked later. Raise InvalidRequestError for an empty list,
    and for a value that is no list.
    """
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence) or not messages:
        raise refusal("messages", shown(messages), "a list of {role, content}, or a list of such lists")
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
        raise refusal(name, shown(values), f"{kind_name} or a list of them")
    if len(values) != num_prompts:
        raise refusal(name, f"{len(values)} for {num_prompts} prompts", "one for all or one for each")
    return list(values)


def progress_bar(num_requests: int, *, is_shown: bool) -> tqdm:
    """Return a progress bar. It is shown only if `is_shown` is true and stderr is an open terminal."""
    is_open = sys.stderr is not None and not sys.stderr.closed
    return tqdm(total=num_requests, desc="requests", unit="req", disable=None if is_shown and is_open else True)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy or of JAX, which is not imported for that."""
    return isinstance(value, np.ndarray) or (hasattr(value, "ndim") and hasattr(value, "sharding"))
