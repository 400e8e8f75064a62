"""Logprobs in the words of OpenAI's protocols: parallel lists for completions, records for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...outputs import Logprob
from ...text.tokenizing.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON has not; vLLM writes it so."""
TokenLogprobs = Mapping[int, Logprob]
"""The logprob of a token and of the likeliest ones, by token id: the token itself comes first."""


class CompletionLogprobs:
    """The `logprobs` of a choice of /v1/completions: four lists with an item for each token."""

    def __init__(self, *, shows_ids: bool):
        """Start without tokens. With `shows_ids`, tokens are shown as `token_id:5`."""
        self._shows_ids = shows_ids
        self._offset = 0
        """Characters of all tokens so far."""
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self,
        token_ids: Sequence[int],
        token_logprobs: Sequence[TokenLogprobs | None],
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Append tokens with their logprobs. A token without any, the first of a prompt, gets null.

        `tokenizer` gives the text of such a token.
        """
        for token_id, candidates in zip(token_ids, token_logprobs, strict=False):
            own = None if candidates is None else candidates[token_id]
            text = own.decoded_token if own is not None else _text_of(token_id, tokenizer)
            self._tokens.append(_shown(token_id, text, shows_id=self._shows_ids))
            self._logprobs.append(None if own is None else _finite(own.logprob))
            self._tops.append(None if candidates is None else self._top(candidates))
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

    def _top(self, candidates: TokenLogprobs) -> dict[str, float]:
        """Return text → logprob. Of tokens with the same text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, one in candidates.items():
            text = _shown(token_id, one.decoded_token, shows_id=self._shows_ids)
            top[text] = max(_finite(one.logprob), top.get(text, MIN_LOGPROB))
        return top


class ChatLogprobs:
    """The `logprobs.content` of a choice of a chat: a record for each token, with those of the likeliest ones."""

    def __init__(self, tokenizer: Tokenizer | None, num_tops: int, *, shows_ids: bool):
        """`num_tops` likeliest tokens are shown beside each; −1: all that there are."""
        self.tokenizer, self.num_tops, self.shows_ids = tokenizer, num_tops, shows_ids

    def records(self, token_ids: Sequence[int], token_logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return the records of tokens."""
        records = []
        for token_id, candidates in zip(token_ids, token_logprobs, strict=True):
            ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
            tops = ranked if self.num_tops < 0 else ranked[: self.num_tops]
            record = self._record(token_id, candidates[token_id])
            records.append({**record, "top_logprobs": [self._record(*item) for item in tops]})
        return records

    def _record(self, token_id: int, one: Logprob) -> dict[str, Any]:
        own_bytes = b""
        if self.tokenizer is not None:
            is_special = token_id in self.tokenizer.special_ids
            own_bytes = (self.tokenizer.special_bytes if is_special else self.tokenizer.token_bytes)(token_id)
        token = _shown(token_id, one.decoded_token, shows_id=self.shows_ids)
        return {"token": token, "logprob": _finite(one.logprob), "bytes": list(own_bytes)}


def prompt_records(token_logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of a prompt its logprobs by token id, null for the first."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in candidates.items()
        }
        for candidates in token_logprobs
    ]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _shown(token_id: int, text: str | None, *, shows_id: bool) -> str:
    return f"token_id:{token_id}" if shows_id or text is None else text


def _text_of(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
