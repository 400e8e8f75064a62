"""How many pages a request takes, now and at most, and how much of it may come from the prefix cache.

Knows requests and the block manager; no queue, no slot, no time. The only writer of `fits_limits` of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..checks import refusal
from ..request import Request, SampleSequence
from .block_manager import BlockManager
from .sample_tree import children_of, common_len


class PageDemand:
    """Compares what requests take with what the pool of one block manager has."""

    def __init__(self, blocks: BlockManager):
        self.blocks, self.prefixes, self.store = blocks, blocks.prefixes, blocks.store
        self.arithmetic = blocks.arithmetic

    @property
    def available(self) -> str:
        """Return the words of an error message that say how many pages one request could have if it ran alone."""
        blocks, num_pinned = self.blocks, self.blocks.num_pinned
        pinned = f" beside {num_pinned} pinned ones, which unpin_prefix gives back" if num_pinned else ""
        arithmetic = self.arithmetic
        return f"{blocks.num_available} pages of {arithmetic.block_size} tokens{arithmetic.in_groups}{pinned}"

    def check(self, request: Request, max_num_seqs: int) -> None:
        """Raise InvalidRequestError if the request could not run even if it ran alone.

        That is the case if it has more live samples (samples that have not ended) than there are state slots
        (`max_num_seqs`), or if its samples at full length take more pages than the pool has besides pinned ones.
        """
        num_samples = len(request.live)
        if num_samples > max_num_seqs:
            way_out = "ask for fewer samples or start the engine with a higher max_num_seqs"
            raise refusal("n", num_samples, f"at most max_num_seqs, {max_num_seqs}", way_out)
        if not self.fits_alone(request):
            got = (
                f"{request.prompt_len} tokens and up to {request.max_tokens} more for each of {num_samples} samples, "
                f"which take {self.max_pages(request)} pages"
            )
            way_out = "shorten it, lower max_tokens or n, or start the engine with more num_blocks"
            raise refusal("prompt", got, self.available, way_out)

    def check_fork(
        self, parent: SampleSequence, num_forks: int, max_num_seqs: int, num_tokens: int | None = None
    ) -> None:
        """Raise InvalidRequestError if the parent's request could not run, even alone, with `num_forks` more samples.

        They begin with the parent's first `num_tokens` tokens, by default with all that the host knows.

        Its samples are the live ones, which have not ended, and the forks. They need one state slot each, of which
        there are `max_num_seqs`, and their pages at full length must fit into the pool. Pages of other requests do not
        count, because those can be preempted; pinned pages cannot be taken.
        """
        request = parent.request
        num_tokens = len(parent.token_ids) if num_tokens is None else num_tokens
        num_samples = len(request.live) + num_forks
        # The first tokens that all samples will share. `common_len` is 0 if the parent is the only sample.
        shared_len = min(common_len(request) or num_tokens, num_tokens)
        if parent.num_computed >= max(1, num_tokens - 1) and not self.blocks.can_share(parent, num_tokens - 1):
            shared_len = min(shared_len, 1)  # The forks compute all their tokens in pages of their own.
        num_pages = self._max_pages(request, shared_len, num_samples)
        pool_pages = self.blocks.num_available  # All usable pages of the pool, those in use included, but pinned ones.
        if num_samples > max_num_seqs or num_pages > pool_pages:
            slots = f"{num_samples} of {max_num_seqs} slots"
            got = f"{num_samples} samples of one request, which would take {slots} and up to {num_pages} pages"
            way_out = "fork fewer, or start the engine with a larger max_num_seqs or num_blocks"
            raise refusal("n", got, self.available, way_out)

    def check_pin(self, num_pages: int, requests: Iterable[Request]) -> None:
        """Raise InvalidRequestError if one of `requests` could never run once `num_pages` more pages are pinned.

        `num_available` leaves out the pages that are pinned already. The largest request must fit into what is left.
        Without requests, enough pages for a sequence of one token must be left.
        """
        num_available, pages_of_one_token = self.blocks.num_available, self.arithmetic.max_pages(0, [1])
        num_needed = max(map(self.max_pages, requests), default=pages_of_one_token)
        if num_pages + num_needed > num_available:
            max_new_pins = max(0, num_available - num_needed)
            allowed = f"{max_new_pins}, since {num_needed} of {num_available} must be left for requests"
            way_out = "pin less, or start the engine with more num_blocks"
            raise refusal("prompt", f"a prompt whose pin takes {num_pages} pages", allowed, way_out)

    def max_pages(self, request: Request) -> int:
        """Return the pages that the request takes, beside pinned ones, once all its samples are as long as they may."""
        return self._max_pages(request, common_len(request), len(request.live))

    def _max_pages(self, request: Request, shared_len: int, num_samples: int) -> int:
        """Return the unpinned pages of `num_samples` samples at full length that share `shared_len` first tokens."""
        sample = request.live[0]
        num_pinned = 0 if request.needs_prompt_scores else self.prefixes.num_pinned(sample, request.prompt_len - 1)
        # The last token ends its sequence, so its keys and values are never computed.
        longest = max(one.max_len for one in request.live) - 1
        return self.arithmetic.max_pages(shared_len, [longest] * num_samples) - num_pinned

    def max_samples(self, shared_len: int, num_tokens: int, limit: int) -> int:
        """Return how many samples of so many tokens fit if they share `shared_len` first ones: 1 to `limit`."""
        num_samples, available = limit, self.blocks.num_available
        while num_samples > 1 and self.arithmetic.max_pages(shared_len, [num_tokens] * num_samples) > available:
            num_samples = max(1, num_samples * 3 // 4)
        return num_samples

    def pages_now(self, request: Request, num_cached: int = 0) -> int:
        """Return the pages, over all samples and page-table groups, that the request takes to compute all its tokens.

        The tokens are those that exist now: prompt and output so far. Pages that the request already has are included,
        and pages of tokens that all samples share count once. `num_cached` is the number of first tokens of the root
        sample (the first live one) that will come from the prefix cache.
        """
        root, *forks = request.live
        # The most tokens that one sample still has to compute.
        num_pending = root.num_tokens - max(root.num_computed, num_cached)
        for fork in forks:  # A fork's parent computes their shared tokens; the fork computes the last of them again.
            num_pending = max(num_pending, fork.num_tokens - max(fork.num_computed, fork.fork_len - 1))
        # No chunk is longer than `num_pending`. With shorter chunks, sliding windows need fewer pages.
        arithmetic = replace(self.arithmetic, max_chunk=min(self.arithmetic.max_chunk, num_pending))
        return arithmetic.max_pages(common_len(request), [sequence.num_tokens for sequence in request.live])

    def fits_alone(self, request: Request) -> bool:
        """Return whether the request could run to its end if no other request ran."""
        return self.max_pages(request) <= self.blocks.num_available

    def can_never_run(self, request: Request) -> bool:
        """Return whether an accepted request can no longer run, even alone, since pages were lost or pinned.

        This is computed only if the available pages, the pins or the number of live samples have changed since the last
        call; `request.fits_limits` stores these three numbers. If none has changed, the result is False, because the
        caller ends a request for which it got True.
        """
        limits = (self.blocks.num_available, self.store.num_pin_changes, len(request.live))
        if request.fits_limits == limits:
            return False
        request.fits_limits = limits
        return not self.fits_alone(request)

    def match_limit(self, sequence: SampleSequence) -> int:
        """Return how many of a sequence's first tokens may come from the prefix cache.

        The last token may not, since only a computed token yields logits. If tokens are to be scored, only those before
        the first position without a score may. If some layers have a sliding window, the limit is also one token less
        than what the sequence shares with each live child (`fork_len`). A longer cached prefix could lack pages before
        its own window that the child needs. Example: a sequence of 12 tokens has the limit 11, or with a window and a
        child that shares 9 tokens, the limit 8.
        """
        limit = sequence.num_tokens - 1
        if sequence.request.needs_prompt_scores:
            limit = min(limit, sequence.request.num_scored)
        if sequence.request.scoring is not None:
            limit = min(limit, sequence.num_scored)
        if self.arithmetic.window_groups:
            limit = min([limit, *(child.fork_len - 1 for child in children_of(sequence))])
        return limit
