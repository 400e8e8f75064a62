"""Lets samples of a request begin with the pages of another sample: forks, beams, and the samples of one prompt.

Of the samples that share a partly filled page, each gets a copy before it writes the page, except the last one that
still has it. Knows pages and slots; no queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..kv_cache import sample_tree
from ..kv_cache.block_manager import BlockManager
from ..kv_cache.page_demand import PageDemand
from ..request import Request, RequestState, SampleSequence
from . import progress
from .lifecycle import Lifecycle


class SampleForks:
    """Lets a sample of a request begin where another sample of it stands, and share its pages."""

    def __init__(self, blocks: BlockManager, demand: PageDemand, lifecycle: Lifecycle):
        self.blocks, self.prefixes, self.demand = blocks, blocks.prefixes, demand
        self.lifecycle = lifecycle
        self.counts: Counter[str] = Counter()

    def fork(self, parent: SampleSequence, index: int) -> SampleSequence:
        """Return a new sample, of sample index `index`, with the tokens that the parent has so far."""
        child = parent.request.new_sequence(index, parent.token_ids, self.blocks.num_groups)
        # They share all but the last token, which the child computes itself to draw its next one. What the parent has
        # not computed yet, it computes for both.
        num_shared = child.num_tokens - 1
        awaits_parent = parent.num_computed < max(1, num_shared)
        sample_tree.attach(child, parent, awaits_parent=awaits_parent)
        self.lifecycle.join(child)
        if not awaits_parent:
            self.share(parent, child, num_shared)
        self.counts["fork"] += 1
        return child

    def branch(self, request: Request, parents: Sequence[SampleSequence]) -> list[SampleSequence]:
        """Let the live samples of a request go on as these ones, which may repeat; return which sample continues each.

        A parent continues itself once. Samples that are no parent take the place of further continuations and share
        the parent's pages; the caller copies the tokens. Samples beyond that end. Nothing of the request may be in
        flight.
        """
        idle = [one for one in request.live if all(one is not parent for parent in parents)]
        successors: list[SampleSequence] = []
        for parent in parents:
            successor = idle.pop() if parent in successors else parent
            if successor is not parent:
                self._clone(parent, successor)
            successors.append(successor)
        for one in idle:
            self.lifecycle.finish(one, RequestState.FINISHED_STOPPED)
        return successors

    def _clone(self, parent: SampleSequence, sequence: SampleSequence) -> None:
        """Let a sample that gives up its own pages continue a parent that has computed all of its tokens."""
        self.lifecycle.release(sequence)
        self.prefixes.forget_tokens(sequence)
        progress.start_as(sequence, parent)
        awaits_parent = parent.num_computed < parent.num_tokens
        sample_tree.move_under(sequence, parent, awaits_parent=awaits_parent)
        self.lifecycle.mark_changed()
        if not awaits_parent:
            self.share(parent, sequence, parent.num_tokens)

    def attach(self, sequence: SampleSequence) -> None:
        """Give a sample that has a slot its parent's pages of the tokens they share, which the parent has computed.

        If its parent has ended, or a window has passed what they would share, it starts with what the prefix cache has.
        """
        parent, num_shared = sequence.parent, min(sequence.fork_len, sequence.num_tokens - 1)
        if parent is not None and self.blocks.can_share(parent, num_shared):
            self.share(parent, sequence, num_shared)
            return
        sample_tree.share_nothing(sequence)
        match = self.prefixes.match(sequence, self.demand.match_limit(sequence))
        if self.prefixes.num_free_needed(match) <= self.blocks.num_free:
            progress.start_at(sequence, self.blocks.adopt(sequence, match))

    def share(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Give a sample its parent's pages of so many tokens.

        Both are checked before they write the last of these pages again, since a copy of it may be due. A step in
        flight may still write that page for the parent, so it is not reused before, whichever of the two gives it back.
        """
        self.share_chunk(parent, child, num_tokens)
        progress.set_decode_limit(parent, 0)
        self.lifecycle.defer_free(parent)

    def share_chunk(self, parent: SampleSequence, child: SampleSequence, end: int) -> None:
        """Give a sample the pages up to the end of a chunk that its parent computes in this step for both."""
        self.blocks.share(parent, child, end)
        progress.start_at(child, end)
        sample_tree.set_waiting(child, False)
