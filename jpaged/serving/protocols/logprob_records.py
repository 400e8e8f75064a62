"""Logprobs in the words of OpenAI's protocols: parallel lists for completions, records for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...outputs import Logprob
from ...text.tokenizer import Tokenizer

Entries = Mapping[int, Logprob]
"""The logprob of a token and of the likeliest ones, by token id: the token itself comes first."""


class CompletionLogprobs:
    """The `logprobs` of a choice of /v1/completions: four lists with an item for each token."""

    def __init__(self, *, has_ids: bool):
        """Start without tokens. With `has_ids`, tokens are shown as `token_id:5`."""
        self._has_ids = has_ids
        self._offset = 0
        """Characters of all tokens so far."""
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None], *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Append tokens with their entries. A token without one, the first of a prompt, gets null for its logprob.

        `tokenizer` gives the text of such a token.
        """
        for token_id, scores in zip(token_ids, entries, strict=False):
            own = None if scores is None else scores[token_id]
            text = own.decoded_token if own is not None else _text_of(token_id, tokenizer)
            self._tokens.append(_shown(token_id, text, has_id=self._has_ids))
            self._logprobs.append(None if own is None else own.logprob)
            self._tops.append(None if scores is None else self._top(scores))
            self._offsets.append(self._offset)
            self._offset += len(text or "")

    def take(self) -> dict[str, Any]:
        """Return the lists of the tokens since the last call."""
        lists = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._clear()
        return lists

    def _top(self, scores: Entries) -> dict[str, float]:
        """Return text → logprob. Of tokens with the same text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, one in scores.items():
            text = _shown(token_id, one.decoded_token, has_id=self._has_ids)
            top[text] = max(one.logprob, top.get(text, one.logprob))
        return top


class ChatLogprobs:
    """The `logprobs.content` of a choice of a chat: a record for each token, with those of the likeliest ones."""

    def __init__(self, tokenizer: Tokenizer | None, num_tops: int, *, has_ids: bool):
        """`num_tops` likeliest tokens are shown beside each; −1: all that there are."""
        self.tokenizer, self.num_tops, self.has_ids = tokenizer, num_tops, has_ids

    def of(self, token_ids: Sequence[int], entries: Sequence[Entries]) -> list[dict[str, Any]]:
        """Return the records of tokens."""
        records = []
        for token_id, scores in zip(token_ids, entries, strict=True):
            ranked = sorted(scores.items(), key=lambda item: item[1].rank)
            tops = ranked if self.num_tops < 0 else ranked[: self.num_tops]
            record = self._record(token_id, scores[token_id])
            records.append({**record, "top_logprobs": [self._record(*item) for item in tops]})
        return records

    def _record(self, token_id: int, one: Logprob) -> dict[str, Any]:
        own_bytes = b""
        if self.tokenizer is not None:
            is_special = token_id in self.tokenizer.special_ids
            own_bytes = (self.tokenizer.special_bytes if is_special else self.tokenizer.token_bytes)(token_id)
        token = _shown(token_id, one.decoded_token, has_id=self.has_ids)
        return {"token": token, "logprob": one.logprob, "bytes": list(own_bytes)}


def prompt_records(entries: Sequence[Entries | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of a prompt its logprobs by token id, null for the first."""
    return [
        None
        if scores is None
        else {
            str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in scores.items()
        }
        for scores in entries
    ]


def _shown(token_id: int, text: str | None, *, has_id: bool) -> str:
    return f"token_id:{token_id}" if has_id or text is None else text


def _text_of(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
