"""The samples of one request as a tree: each shares its first tokens with its parent, and gets its pages from it.

The first live sample of a request has no parent. The only writer of `parent`, `fork_len` and `awaits_parent` of
sequences and of `live` of requests. Knows numbers of tokens; no page.
"""

from __future__ import annotations

from ..request import Request, SampleSequence


def children_of(sequence: SampleSequence) -> list[SampleSequence]:
    """Return the live samples that share their first tokens with this one."""
    return [other for other in sequence.request.live if other.parent is sequence]


def common_len(request: Request) -> int:
    """Return how many first tokens all live samples of a request are known to share; 0 if there is only one.

    It is the smallest number of tokens that a live sample is recorded to share with its parent (`fork_len`).
    """
    return min((sequence.fork_len for sequence in request.live if sequence.parent is not None), default=0)


def num_distinct_tokens(request: Request) -> int:
    """Count the computed tokens of all live samples, shared ones once: what recomputing the request would take."""
    return sum(max(0, sequence.num_computed - sequence.fork_len) for sequence in request.live)


def samples_drawn_at(sequence: SampleSequence, end: int) -> list[SampleSequence]:
    """Return the samples that draw their next token from the logits of position `end` − 1 of this sequence.

    One is the sequence itself, if it has exactly `end` tokens. The others are its children that still wait for its
    pages, share exactly `end` tokens with it and hold a state slot to draw in; and the children of these, by the same
    rule. The list is empty if the sequence has more tokens and no child begins to differ from it there.
    """
    samples = [sequence] if sequence.num_tokens == end else []
    for child in children_of(sequence):
        if child.awaits_parent and child.seq_slot and child.fork_len == end:  # Slot 0 means that it has none.
            samples += samples_drawn_at(child, end)
    return samples


def attach(sequence: SampleSequence, parent: SampleSequence, *, awaits_parent: bool) -> None:
    """Make a live sample the child of `parent`, with which it shares all tokens that the sample has now."""
    sequence.parent, sequence.fork_len, sequence.awaits_parent = parent, sequence.num_tokens, awaits_parent


def move_under(sequence: SampleSequence, parent: SampleSequence, *, awaits_parent: bool) -> None:
    """Move a live sample to the end of `live`, and make it the child of `parent` as `attach` does."""
    remove(sequence)
    sequence.request.live.append(sequence)
    attach(sequence, parent, awaits_parent=awaits_parent)


def set_waiting(sequence: SampleSequence, is_waiting: bool) -> None:
    """Note whether a sample waits for its parent to compute the tokens that they share."""
    sequence.awaits_parent = is_waiting


def share_nothing(sequence: SampleSequence) -> None:
    """Record that a sample computes all of its tokens itself, in pages of its own.

    A sample with a parent stays its child in the tree, with `fork_len` 1: both have the first token in common, but a
    child computes its last shared token itself, so no page is shared.
    """
    sequence.fork_len, sequence.awaits_parent = 0 if sequence.parent is None else 1, False


def remove(sequence: SampleSequence) -> None:
    """Take a sample out of the live ones of its request, and give its children another parent."""
    sequence.request.live.remove(sequence)
    reparent_children(sequence)


def reset_to_prompt(request: Request) -> None:
    """Let all live samples of a request share its prompt, which the first of them computes for all."""
    root, *forks = request.live
    root.parent, root.fork_len = None, 0
    for sequence in forks:
        sequence.parent, sequence.fork_len = root, request.prompt_len


def reparent_children(sequence: SampleSequence) -> None:
    """Give the children of a sample that has left `live` another parent.

    The new parent is the sample's own parent. If the sample had none, the new parent is the child that shared the most
    tokens with the sample; that child becomes the root of the request: the first live sample, without a parent. Each
    other child shares with the new parent the tokens that both had in common with the sample.

    Example: b and c share 10 and 6 tokens with the root a, which has ended. Then b becomes the root, and c its child,
    which shares 6 tokens.
    """
    children, parent, shared_len = children_of(sequence), sequence.parent, sequence.fork_len
    if not children:
        return
    if parent is None:
        parent = max(children, key=lambda child: child.fork_len)
        shared_len = parent.fork_len
    for child in children:
        if child is not parent:
            child.parent, child.fork_len = parent, min(child.fork_len, shared_len)
    # The new root changes last: if an interrupt comes before, the function can be called again.
    if parent in children:
        parent.parent, parent.fork_len = None, 0
        live = sequence.request.live
        live[:] = [parent, *(sample for sample in live if sample is not parent)]
