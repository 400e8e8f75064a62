"""A tokenizer as llguidance asks for one, where it cannot read the tokenizer's own JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..tokenizing.tokenizer import Tokenizer


class Vocabulary:
    """A tokenizer as llguidance asks for one: the bytes of each token, and the tokens of text that must come next."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_token_ids: Sequence[int]):
        # Also those of ids without a token, b"": llguidance counts them here, whatever its n_vocab says.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_ids)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else tokenizer.eos_token_id or 0
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, data: bytes) -> list[int]:
        """Return tokens with the bytes `data`, which stand behind others: llguidance allows the first of them alone.

        They are the tokenizer's own, unless it would change the text (a normalizer does, and it is a part of a
        character at its end). Then the longest token that fits is taken at each place, up to one where none does.
        """
        token_ids = self._tokenizer.encode_behind(data.decode(errors="replace"))
        if b"".join([self.tokens[token_id] for token_id in token_ids]) == data:
            return token_ids
        start, token_ids = 0, []
        while start < len(data):
            ends = range(min(len(data), start + self._max_token_len), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Bytes → the last token of them, since the tokens of single bytes come before those of characters."""
        special = set(self.special_token_ids)
        return {data: token_id for token_id, data in enumerate(self.tokens) if data and token_id not in special}

    @cached_property
    def _max_token_len(self) -> int:
        return max(map(len, self._ids), default=0)
