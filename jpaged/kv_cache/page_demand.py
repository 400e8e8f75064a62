"""How many pages a request takes, now and at most, and what of them the prefix cache may give.

Knows requests and the block manager; no queue, no slot, no time.
"""

from __future__ import annotations

from .block_manager import AllocStatus, BlockManager
from .errors import InvalidRequestError
from .fork_tree import children_of, common_len
from .request import Request, Sequence


class PageDemand:
    """Arithmetic over one block manager."""

    def __init__(self, blocks: BlockManager):
        self.blocks = blocks

    @property
    def available(self) -> str:
        """The pages that one request could have, for whoever is told that they are too few."""
        blocks, num_pinned = self.blocks, self.blocks.num_pinned
        pinned = f" beside {num_pinned} pinned ones, which unpin_prefix gives back" if num_pinned else ""
        return f"{blocks.num_available} pages of {blocks.block_size} tokens{pinned}"

    def check(self, request: Request, max_num_seqs: int) -> None:
        """InvalidRequestError if the request could not run were it alone."""
        if len(request.live) > max_num_seqs:
            raise InvalidRequestError(
                f"n: got {len(request.live)}, allowed: at most max_num_seqs, {max_num_seqs}; ask for fewer "
                "samples or start the engine with a higher max_num_seqs",
                param="n",
            )
        if not self.fits_alone(request):
            raise InvalidRequestError(
                f"prompt: got {request.prompt_len} tokens and up to {request.max_tokens} more for each of "
                f"{len(request.live)} samples, which take {self.most_pages(request)} pages; allowed: "
                f"{self.available}; shorten it, lower max_tokens or n, or start the engine with more num_blocks",
                param="prompt",
            )

    def check_fork(self, parent: Sequence, num_forks: int, max_num_seqs: int) -> None:
        """InvalidRequestError if the parent's request could not run, were it alone, with so many samples more."""
        request = parent.request
        num_samples = len(request.live) + num_forks
        shared_len = min(common_len(request) or parent.num_tokens, len(parent.token_ids))
        num_pages = self._most_pages(request, shared_len, num_samples)
        if num_samples > max_num_seqs or num_pages > self.blocks.num_available:
            raise InvalidRequestError(
                f"n: got {num_samples} samples of one request, which would take {num_samples} of {max_num_seqs} slots "
                f"and up to {num_pages} pages; allowed: {self.available}; fork fewer, or start the engine with a "
                "larger max_num_seqs or num_blocks",
                param="n",
            )

    def most_pages(self, request: Request) -> int:
        """Pages that the request takes beside pinned ones when all of its samples have become as long as they may."""
        return self._most_pages(request, common_len(request), len(request.live))

    def _most_pages(self, request: Request, shared_len: int, num_samples: int) -> int:
        first = request.live[0]
        num_pinned = (
            0 if request.needs_prompt_scores else self.blocks.prefixes.num_pinned(first, request.prompt_len - 1)
        )
        # The last token ends its sequence, so that its keys and values are never computed.
        return self.blocks.most_pages(shared_len, [first.max_len - 1] * num_samples) - num_pinned

    def pages_now(self, request: Request) -> int:
        """Pages that the request takes for the tokens that it has."""
        return self.blocks.most_pages(common_len(request), [sequence.num_tokens for sequence in request.live])

    def fits_alone(self, request: Request) -> bool:
        """Whether the request could run to its end if nobody else did."""
        return self.most_pages(request) <= self.blocks.num_available

    def status_of(self, request: Request, num_pages: int) -> AllocStatus:
        """NEVER if the request would not fit were it alone, LATER if so many pages are not free now."""
        return self.blocks.status_of(self.most_pages(request), num_pages)

    def can_never_run(self, request: Request) -> bool:
        """Whether a request that was taken cannot run any more. Looked into when pool, pins or samples have changed."""
        conditions = (self.blocks.num_available, self.blocks.store.num_pinnings, len(request.live))
        if request.fits_under == conditions:
            return False
        request.fits_under = conditions
        return not self.fits_alone(request)

    def match_limit(self, sequence: Sequence) -> int:
        """Tokens of a sequence that may come from the prefix cache.

        Not the last one it knows, since computing one is what yields logits. Where a prompt's own scores are
        wanted, none that has not been scored. Where windows pass, none that its children have still to see.
        """
        limit = sequence.num_tokens - 1
        if sequence.request.needs_prompt_scores:
            limit = min(limit, sequence.request.num_scored)
        if self.blocks.window_groups:
            limit = min([limit, *(child.fork_len - 1 for child in children_of(sequence) if child.fork_len)])
        return limit
