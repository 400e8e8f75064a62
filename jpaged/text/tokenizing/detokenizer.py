"""Turns a stream of token ids into a stream of text, and finds stop strings in it.

Every token adds some bytes (`Tokenizer.token_bytes`), and the text is their UTF-8. So a token costs the same at any
place of the text, a character split over several tokens comes out with its last byte, and nothing is decoded twice. The
text is that of `Tokenizer.decode` with one exception: SentencePiece turns a whole run of byte tokens into U+FFFD if any
part of it is not UTF-8, which a stream cannot know in time; here the characters in the run stay, and each byte that
belongs to no character becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from ...outputs import Mark
from .tokenizer import Tokenizer


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid byte by U+FFFD; Python's own handler replaces a run of them by a single one."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_EACH_BYTE = "jpaged.replace-each-byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """Keeps the text of one sequence's output while it grows.

    The end of the prompt matters for the first output token alone: the prompt may have left a character unfinished,
    and some tokenizers drop a leading space only where no text precedes. No text of the prompt comes out, but a
    character that the prompt began and the output completes does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        mark_ids: frozenset[int] = frozenset(),
    ):
        """Start with an empty output after the prompt `prompt_token_ids`.

        The options have the names and the meaning of `SamplingParams`. They say whether special tokens appear in the
        text and how they are spaced, which stop strings end it, whether the text then includes the stop string, and
        after how many output tokens stop strings count. No stop string may be empty. `marks` tells where the tokens
        among `mark_ids` stand in the text.
        """
        assert all(stop), "an empty stop string is refused before it gets here"
        self.num_tokens = 0
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        # A special token directly after another one is written without the space that some decoders put before it.
        self._joined = frozenset[int]() if spaces_between_special_tokens else tokenizer.special_ids
        self._is_after_joined = False
        # SentencePiece's decoder replaces each broken byte, byte-level decoders the longest broken stretch.
        self._errors = _EACH_BYTE if tokenizer.has_byte_fallback else "replace"
        self._matchers = [_StopMatcher(text) for text in stop]
        self._first_chars = frozenset(text[0] for text in stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._mark_ids = mark_ids
        self._marks: list[Mark] = []
        self._num_chars = 0
        """Characters of the text so far; counted only if tokens are marked."""
        self.pieces: list[str] = []
        """What calls of `delta` have returned, without empty ones."""
        self._unsent: list[str] = []
        self._is_finished = False
        # The prompt may end within a character. Its bytes so far are the first `_num_prompt_bytes` of `_pending`, the
        # bytes that await the rest of their character.
        prompt_bytes = self._last_bytes(prompt_token_ids)
        self._is_first = not prompt_bytes
        _, used = codecs.utf_8_decode(prompt_bytes, "replace", False)  # All bytes but those of an unfinished character.
        self._pending = prompt_bytes[used:]
        self._num_prompt_bytes = len(self._pending)

    @property
    def text(self) -> str:
        """Return the output so far, up to a stop string, without the bytes of an unfinished character."""
        return "".join(self.pieces) + "".join(self._unsent)

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Add output tokens; return the stop string that they complete, None if they complete none.

        The text grows by the characters that the tokens complete; bytes of a character that is not complete wait for
        the next token. If several stop strings are completed, the one that ends first counts, and of those that end at
        one character the longest. The text then ends before the stop string, or after it if the output includes stop
        strings, and later tokens of `token_ids` are ignored: `num_tokens` counts the tokens up to the end. The first
        `min_tokens` tokens complete no stop string. The sequence must not have ended.
        """
        assert not self._is_finished, "tokens after the end of the sequence"
        tokenizer, skipped, mark_ids = self._tokenizer, self._skipped, self._mark_ids
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id in skipped:
                if token_id in mark_ids:
                    self._marks.append(Mark(self._num_chars, token_id))
                continue
            piece = tokenizer.token_bytes(token_id)
            if self._joined:
                is_joined = token_id in self._joined
                if is_joined and self._is_after_joined:
                    piece = tokenizer.special_bytes(token_id)
                self._is_after_joined = is_joined
            # SentencePiece drops a leading space of the first token that adds text.
            if self._is_first and piece:
                piece = tokenizer.token_bytes(token_id, is_first=True)
                self._is_first = False
            data = self._pending + piece
            if self._num_prompt_bytes:
                data = self._resolve_prompt_bytes(data)
                # Still too few bytes to tell whether they complete the prompt's last character.
                if self._num_prompt_bytes:
                    self._pending = data
                    continue
            text, used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[used:]
            is_over = bool(text) and self._push(text)
            if mark_ids:
                self._num_chars += len(text)
                if token_id in mark_ids:  # What stands before the token in `text` were bytes of no character.
                    self._marks.append(Mark(self._num_chars - len(piece.decode(errors="replace").lstrip()), token_id))
            if is_over:
                return self.stop_string
        return None

    @property
    def num_marks(self) -> int:
        """Return the number of marks so far, those in text that is held back included."""
        return len(self._marks)

    def marks(self, first: int, num_chars: int) -> tuple[Mark, ...]:
        """Return the marks in the first `num_chars` characters of the text, from number `first` on.

        A token without characters of its own is in a text that ends where it stands.
        """
        skipped = self._skipped
        inside = itertools.takewhile(
            lambda mark: mark.place < num_chars or (mark.place == num_chars and mark.token_id in skipped),
            itertools.islice(self._marks, first, None),
        )
        return tuple(inside)

    def finish(self) -> None:
        """End the sequence: an unfinished character becomes U+FFFD, and no text is held back any more.

        Bytes that the prompt left unfinished are not part of the output. A second call does nothing.
        """
        if not self._is_finished:
            self._is_finished = True
            text, _ = codecs.utf_8_decode(self._pending[self._num_prompt_bytes :], self._errors, True)
            self._unsent.append(text)

    def delta(self, *, finished: bool = False) -> str:
        """Return the text since the last call, as far as no later token can change it, and add it to `pieces`.

        Text that may be the beginning of a stop string is held back for a later call, unless the output includes stop
        strings. With `finished`, the sequence is ended first, so that nothing is held back. Joined, all deltas of an
        ended sequence are equal to `text`.
        """
        if finished:
            self.finish()
        new = "".join(self._unsent)
        end = len(new)
        # `num_matched` characters at the end of the text are the beginning of a stop string.
        if self._matchers and not (self._is_finished or self._include_stop):
            end -= max(matcher.num_matched for matcher in self._matchers)
        self._unsent = [new[end:]] if end < len(new) else []
        if end:
            self.pieces.append(new[:end])
        return new[:end]

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of the last tokens of `token_ids`; special tokens that the text leaves out add none.

        So many tokens are taken that the result has at least four bytes, the length of the longest UTF-8 character. If
        all tokens together have fewer, all their bytes are returned.
        """
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
                if len(tail) >= 4:
                    break
        return tail

    def _resolve_prompt_bytes(self, data: bytes) -> bytes:
        """Decide whether `data`, which begins with the prompt's unfinished character, completes that character.

        If it does, the character belongs to the output and `data` is returned. If the bytes cannot be a character, the
        prompt's text has them already, as U+FFFD, and `data` is returned without the prompt's bytes. In both cases
        `_num_prompt_bytes` becomes 0. While too few bytes have come to tell, `data` is returned and nothing changes.

        Example: the prompt ends with E2 82, the first two bytes of "€". With the byte AC they are complete, and all
        three are returned. With the byte 41 ("A") they cannot be a character, and only 41 is returned.
        """
        # The first byte of a UTF-8 character tells its length.
        char_len = 4 if data[0] >= 0xF0 else 3 if data[0] >= 0xE0 else 2
        char, used = codecs.utf_8_decode(data[:char_len], "replace", False)
        if used:  # 0 as long as the bytes may still become a character.
            if len(char) > 1 or char == "\ufffd":
                data = data[self._num_prompt_bytes :]
            self._num_prompt_bytes = 0
        return data

    def _push(self, text: str) -> bool:
        """Add decoded text to the output, and return whether it completes a stop string.

        If it does, the output ends there: `stop_string` is set, and the text after the stop string is dropped. The stop
        string itself is dropped too, unless the output includes stop strings.
        """
        hit = self._find_stop(text) if self._matchers else None
        if hit is None:
            self._unsent.append(text)
            return False
        end, self.stop_string = hit
        self._unsent.append(text[:end])
        if not self._include_stop:
            # The whole stop string is unsent, since it was held back from its first character on.
            self._unsent = ["".join(self._unsent)[: -len(self.stop_string)]]
        self._pending = b""
        self._num_prompt_bytes = 0
        self._is_finished = True
        return True

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Return (end, stop string) of the first stop string that ends in the new `text`; None if none ends there.

        `end` is the index in `text` after the stop string's last character. The stop string may begin in the text of
        earlier calls: after "a E", the text "ND b" has the end 2 for the stop string "END". If several end at one
        character, the longest counts. Nothing is found within the first `min_tokens` tokens, but the matchers still
        read the text.
        """
        matchers = self._matchers
        # Fast path: no stop string is begun, and none begins in this text.
        if self._first_chars.isdisjoint(text) and not any(matcher.num_matched for matcher in matchers):
            return None
        may_stop = self.num_tokens > self._min_tokens
        for index, char in enumerate(text):
            completed = [matcher.stop for matcher in matchers if matcher.advance(char)]
            if completed and may_stop:
                return index + 1, max(completed, key=len)
        return None


class _StopMatcher:
    """Finds one stop string character by character, in linear time (Knuth, Morris and Pratt, 1977).

    `num_matched` is the length of the longest suffix of the text that is a prefix of the stop string.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str):
        """Compute the failure function of `stop`, a string that is not empty; nothing is matched yet."""
        self.stop, self.num_matched = stop, 0
        # borders[n] is the length of the longest proper suffix of stop[:n] that is a prefix of the stop string: for
        # "abab" they are 0, 0, 0, 1, 2. A proper suffix is shorter than the whole.
        self._borders = [0, 0]
        border = 0
        for char in stop[1:]:
            while border and stop[border] != char:
                border = self._borders[border]
            border += stop[border] == char
            self._borders.append(border)

    def advance(self, char: str) -> bool:
        """Read one more character of the text, and return whether the stop string ends with it.

        A mismatch falls back to the next shorter prefix of the stop string that the text so far ends with. So does a
        completion, since occurrences may overlap: after "abab" for the stop string "abab", 2 characters are matched.
        """
        matched, stop = self.num_matched, self.stop
        while matched and stop[matched] != char:
            matched = self._borders[matched]
        matched += stop[matched] == char
        is_complete = matched == len(stop)
        self.num_matched = self._borders[matched] if is_complete else matched
        return is_complete
