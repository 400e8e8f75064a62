"""Samples share their first tokens, also as samples fork and end."""

import pytest

from jpaged.kv_cache.sample_tree import reparent_children, samples_drawn_at

from ..host_requests import new_request

PROMPT = [1, 2, 3]


def family(*forks):
    """Return a request with further samples, each given as (parent, number of tokens shared with it)."""
    request = new_request(PROMPT, max_tokens=20)
    for index, (parent, fork_len) in enumerate(forks, 1):
        child = request.new_sequence(index, request.sequences[0].token_ids, 1)
        child.parent, child.fork_len = request.sequences[parent], fork_len
    return request


def end(sequence):
    sequence.request.live.remove(sequence)
    reparent_children(sequence)


def tree(request):
    """Return index → (index of the parent, shared tokens) of the live samples, in their order."""
    return {one.index: (one.parent.index if one.parent else None, one.fork_len) for one in request.live}


def test_a_sample_that_gets_new_children_keeps_its_parent_and_its_place():
    request = family((0, 5), (1, 7), (2, 9), (2, 6))
    end(request.sequences[2])
    assert tree(request) == {0: (None, 0), 1: (0, 5), 3: (1, 7), 4: (1, 6)}
    assert [one.index for one in request.live] == [0, 1, 3, 4]


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_reparenting_that_was_interrupted_can_be_done_again(num_done):
    request = family((0, 5), (0, 6), (0, 7))
    first, second, third, fourth = request.sequences
    for child in (second, third)[:num_done]:
        child.parent, child.fork_len = fourth, min(child.fork_len, 7)
    request.live.remove(first)
    reparent_children(first)
    assert tree(request) == {3: (None, 0), 1: (3, 5), 2: (3, 6)}
    reparent_children(first)
    assert tree(request) == {3: (None, 0), 1: (3, 5), 2: (3, 6)}


@pytest.mark.parametrize(
    ("forks", "ended", "left"),
    [
        ([(0, 5), (0, 6), (0, 4)], 0, {2: (None, 0), 1: (2, 5), 3: (2, 4)}),
        ([(0, 5), (1, 9), (1, 3)], 1, {0: (None, 0), 2: (0, 5), 3: (0, 3)}),
        ([(0, 5), (1, 9)], 0, {1: (None, 0), 2: (1, 9)}),
        ([(0, 5), (1, 9)], 2, {0: (None, 0), 1: (0, 5)}),
        ([(0, 8), (0, 8)], 0, {1: (None, 0), 2: (1, 8)}),
    ],
)
def test_samples_left_share_with_each_other_what_they_shared_with_the_one_that_ended(forks, ended, left):
    request = family(*forks)
    end(request.sequences[ended])
    assert tree(request) == left
    assert list(tree(request)) == list(left), "the one without a parent comes first"


def test_all_samples_that_wait_and_have_as_many_tokens_draw_from_a_row():
    request = family((0, 3), (0, 3), (1, 3), (0, 2))
    first, waits, late, grandchild, other = request.sequences
    for child in (waits, late, grandchild, other):
        child.awaits_parent, child.seq_slot = True, 1
    late.num_tokens = 5  # It attaches later and goes on by itself.
    assert samples_drawn_at(first, 3) == [first, waits, grandchild]
    assert samples_drawn_at(first, 2) == []
    first.num_tokens = 9
    assert samples_drawn_at(first, 3) == [waits, grandchild]
    waits.awaits_parent = False
    assert samples_drawn_at(first, 3) == []
    waits.awaits_parent, waits.seq_slot = True, 0
    assert samples_drawn_at(first, 3) == []
