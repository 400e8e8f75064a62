"""How many pages sequences take, from their lengths alone: one arithmetic for the pool's size, admission and refusals.

A group of full attention has the pages of all tokens. A group with a window has at most the pages that a query at the
start of the current page sees, the current page, and the pages that steps which have not retired write.

Knows page-table groups by their windows; no page number, no sequence, no token id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PageArithmetic:
    """The numbers of pages that sequences take in one set of page-table groups."""

    windows: tuple[int | None, ...]
    """Tokens that a query sees in each page-table group, its own among them; None for all."""
    block_size: int
    """Tokens per page."""
    max_chunk: int = 1
    """Most tokens of one sequence in a step, whether of its prompt or decoded one after another."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @cached_property
    def window_groups(self) -> list[tuple[int, int]]:
        """Return (group, window) of each group that has a window."""
        return [(group, window) for group, window in enumerate(self.windows) if window is not None]

    @property
    def in_groups(self) -> str:
        """Return what a message says after a number of pages: the number of groups, or nothing if there is one."""
        return f" in {self.num_groups} groups of layers" if self.num_groups > 1 else ""

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages of one full-attention group that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible_page(self, group: int, num_tokens: int) -> int:
        """Return the index of the first page that the query at position `num_tokens`, or any later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def window_pages(self, window: int, num_steps: int = 1, *, is_fork: bool = False) -> int:
        """Return an upper bound of the pages that a sequence has in a group with a sliding window of `window` tokens.

        The bound holds for every length of the sequence, and is at most one page more than is ever needed. `num_steps`
        counts the steps that have not retired, including the step that the pages are taken for, because pages are given
        back only when a step retires. Each step computes at most `max_chunk` tokens of the sequence.

        A fork (`is_fork`) takes over pages of its parent, by `BlockManager.share`: those of the last `window` tokens,
        although its own first query attends to only `window` − 1 earlier ones. The one more is there because the fork
        may be forked in turn: a fork computes the last shared token again, and that query attends to one token more.

        Example with pages of 4 tokens and `max_chunk` 1: a sequence has at most 2 + 1 = 3 pages for a window of 9
        tokens, and a fork at most 3 + 1 = 4.
        """
        num_tokens = num_steps * self.max_chunk
        # The pages before the page of the first query hold at most `window` − 1 tokens that it attends to, and are most
        # if it begins its page. The pages from its own on are most if it ends its page: `block_size` − 1 tokens lie
        # before it there. It cannot both begin and end its page, so the sum may be one page too high.
        pages_before_first_query = self.pages_for(window - 1)
        pages_from_first_query = self.pages_for(self.block_size - 1 + num_tokens)
        num_pages = pages_before_first_query + pages_from_first_query
        if not is_fork:
            return num_pages
        # The additional token of a fork makes a difference only if the fork's first query begins a page: then all
        # `window` tokens lie in the pages before it.
        return max(num_pages, self.pages_for(window) + self.pages_for(num_tokens))

    def max_pages(self, fork_len: int, total_lens: Iterable[int], *, num_steps: int = 1) -> int:
        """Return the most pages that sequences of `total_lens` tokens take if they share their first `fork_len` tokens.

        Pages of all page-table groups are counted. With one sequence, `fork_len` plays no role. `num_steps` is the
        number of steps in flight at once: 1 gives the minimum to make progress, since a sequence may wait until its
        last step has retired; the in-flight limit gives the peak.

        Example with pages of 4 tokens and one group with full attention: two sequences of 10 and 13 tokens with a
        `fork_len` of 9 share 2 pages. They have 1 and 2 more pages of their own, so the result is 5.
        """
        lens = list(total_lens)
        # A forked sequence computes its last shared token again, in a page of its own.
        shared_pages = max(0, fork_len - 1) // self.block_size
        unshared_pages = [self.pages_for(length) - shared_pages for length in lens]
        pages_under_full_attention = shared_pages + sum(unshared_pages)
        num_pages = self.windows.count(None) * pages_under_full_attention
        for _, window in self.window_groups:
            window_pages = self.window_pages(window, num_steps, is_fork=len(lens) > 1)
            # While the sequences still attend to their common tokens, they share pages as under full attention.
            unshared_bound = sum(min(window_pages, shared_pages + pages) for pages in unshared_pages)
            num_pages += min(pages_under_full_attention, unshared_bound)
        return num_pages

    def longest_len(self, num_pages: int, max_len: int) -> int:
        """Return the tokens of the longest sequence that `num_pages` pages hold: `max_len`, or fewer in whole pages."""
        if self.max_pages(0, [max_len]) <= num_pages:
            return max_len
        lens = range(self.block_size, max_len + self.block_size, self.block_size)
        return self.block_size * bisect_right(lens, num_pages, key=lambda length: self.max_pages(0, [length]))
