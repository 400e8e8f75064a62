"""Which of several cores computes a request: the one with the least to do for it and beside it.

    tokens of its prompts that are not cached there + the same of all unfinished requests there, and one for each sample

A core's prefix cache is followed from here, by the hashes of the pages of prompts that were sent to it. A sample counts
as the one token that a step computes for it: otherwise requests whose prompts are cached would cost nothing, and all go
to one core. Knows no process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..kv_cache.prefix_hash import extend_hashes
from ..messages import NewRequest
from ..request import CacheKey


class RequestTokens(NamedTuple):
    """What a placement needs of the requests of one stream, which go to the same core."""

    prompts: tuple[tuple[bytes, ...], ...]
    """For each prompt the hashes of its full pages."""
    num_prompt_tokens: int
    num_samples: int


class Placement:
    """What each core has cached, and what it has still to do."""

    def __init__(self, num_cores: int, *, page_size: int, num_pages: int):
        """A core caches `num_pages` pages of `page_size` tokens; without a prefix cache `num_pages` is 0."""
        self._page_size, self._num_pages = page_size, num_pages
        self._cores = [_CoreTokens() for _ in range(num_cores)]

    def tokens_of(self, messages: Sequence[NewRequest]) -> RequestTokens:
        """Return what the other calls need of some requests."""
        return RequestTokens(
            prompts=tuple(self._hashes_of(one) for one in messages),
            num_prompt_tokens=sum(one.num_prompt_tokens for one in messages),
            num_samples=sum(one.params.n for one in messages),
        )

    def ranked(self, tokens: RequestTokens, cores: Collection[int]) -> list[int]:
        """Return these cores, the best one for some requests first."""

        def cost(core: int) -> int:
            return self._num_uncached(tokens, core) + self._cores[core].num_unfinished_tokens

        return sorted(cores, key=lambda core: (cost(core), core))

    def place(self, tokens: RequestTokens, core: int) -> Callable[[], None]:
        """Note that a core gets some requests; return what is called once they are over. Further calls do nothing."""
        placed, num_tokens = self._cores[core], self._num_uncached(tokens, core) + tokens.num_samples
        for hashes in tokens.prompts:
            placed.note_cached(hashes, self._num_pages)
        placed.num_unfinished_tokens += num_tokens
        is_over = False

        def note_over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                placed.num_unfinished_tokens -= num_tokens

        return note_over

    def forget(self, core: int) -> None:
        """Note that a core is a new one: it has cached nothing, and has nothing to do."""
        self._cores[core] = _CoreTokens()

    def forget_prefixes(self) -> None:
        """Note that no core has anything cached."""
        for core in self._cores:
            core.forget_prefixes()

    def num_unfinished_tokens(self, core: int) -> int:
        """Return what a core has to do: see above."""
        return self._cores[core].num_unfinished_tokens

    def _num_uncached(self, tokens: RequestTokens, core: int) -> int:
        """Return the prompt tokens of requests that a core has not cached."""
        num_cached_pages = sum(map(self._cores[core].num_cached, tokens.prompts))
        return tokens.num_prompt_tokens - num_cached_pages * self._page_size

    def _hashes_of(self, message: NewRequest) -> tuple[bytes, ...]:
        if not self._num_pages:
            return ()
        hashes: list[bytes] = []
        num_pages = message.num_prompt_tokens // self._page_size
        key = CacheKey(cache_salt=message.cache_salt)
        extend_hashes(hashes, array("i", message.prompt_token_ids), num_pages, self._page_size, key)
        return tuple(hashes)


class _CoreTokens:
    """What one core has cached, and has still to do."""

    def __init__(self) -> None:
        self.num_unfinished_tokens = 0
        self._pages: dict[bytes, None] = {}
        """Hashes of pages, the one that was used last at the end."""

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many pages of a prompt are cached, from its first one on."""
        for index, one in enumerate(hashes):
            if one not in self._pages:
                return index
        return len(hashes)

    def note_cached(self, hashes: Sequence[bytes], max_pages: int) -> None:
        """Note that the pages of a prompt are used.

        Its last ones are forgotten first, as nothing is found by them alone.
        """
        for one in reversed(hashes):
            self._pages.pop(one, None)
            self._pages[one] = None
        while len(self._pages) > max_pages:
            del self._pages[next(iter(self._pages))]

    def forget_prefixes(self) -> None:
        self._pages.clear()
