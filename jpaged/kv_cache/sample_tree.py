"""Samples of one prompt as a tree: each shares its first tokens with its parent, and attaches to it to share pages.

The first live sample of a request has no parent. Knows tokens; no page.
"""

from __future__ import annotations

from .request import Request, Sequence


def children_of(sequence: Sequence) -> list[Sequence]:
    """Live samples that share their first tokens with this one."""
    return [other for other in sequence.request.live if other.parent is sequence]


def common_len(request: Request) -> int:
    """Tokens that all live samples of a request share, as far as is known; 0 if there is only one."""
    return min((sequence.fork_len for sequence in request.live if sequence.parent is not None), default=0)


def num_distinct(request: Request) -> int:
    """Computed tokens of all live samples, each counted once: what computing the request anew would take."""
    return sum(max(0, sequence.num_computed - sequence.fork_len) for sequence in request.live)


def samplers_of(sequence: Sequence, end: int) -> list[Sequence]:
    """Who draws its next token from position `end` − 1 of this sequence.

    The sequence itself, if it knows no more tokens, and the samples that wait for its pages and know as many.
    """
    samplers = [sequence] if sequence.num_tokens == end else []
    for child in children_of(sequence):
        if child.awaits_parent and child.slot and child.fork_len == end:
            samplers += samplers_of(child, end)
    return samplers


def leave_children(sequence: Sequence) -> None:
    """A sample has ended and left its request's `live`: what its children share with it they share with each other."""
    children, parent, common = children_of(sequence), sequence.parent, sequence.fork_len
    if not children:
        return
    if parent is None:
        parent = max(children, key=lambda child: child.fork_len)
        common = parent.fork_len
    for child in children:
        if child is not parent:
            child.parent, child.fork_len = parent, min(child.fork_len, common)
    # Last, so that it can be done again if it is broken off.
    if parent in children:
        parent.parent, parent.fork_len = None, 0
        live = sequence.request.live
        live[:] = [parent, *(one for one in live if one is not parent)]
