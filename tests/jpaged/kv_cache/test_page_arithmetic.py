"""Pages that sequences take, from their lengths: shared prefixes, windows, steps in flight, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.kv_cache.page_arithmetic import PageArithmetic


def arithmetic(block_size, *, windows=(None,), max_chunk=1):
    return PageArithmetic(windows, block_size, max_chunk)


@pytest.mark.parametrize(
    ("fork_len", "lens", "num_pages"),
    [(0, [9], 3), (0, [9, 9], 6), (9, [9, 9], 4), (8, [9, 9], 5), (7, [9, 9], 5), (4, [9, 9, 9], 9), (9, [9], 3)],
)
def test_shared_pages_count_once_and_the_page_of_a_fork_s_last_token_apart(fork_len, lens, num_pages):
    assert arithmetic(4).max_pages(fork_len, lens) == num_pages
    assert arithmetic(1).max_pages(fork_len, lens) == sum(lens) - max(0, fork_len - 1) * (len(lens) - 1)


def test_a_window_takes_no_more_pages_than_it_sees_and_computes():
    some = arithmetic(4, windows=(None, 5), max_chunk=8)
    assert some.max_pages(0, [100]) == 25 + 4
    assert some.max_pages(0, [8]) == 2 + 2
    assert some.max_pages(0, [100], num_steps=2) == 25 + 6
    assert some.max_pages(9, [100, 100]) == 25 + 25 - 2 + 2 * 4
    assert arithmetic(4, windows=(6,), max_chunk=8).max_pages(0, [100]) == 5
    assert arithmetic(4, windows=(5,), max_chunk=9).max_pages(0, [100]) == 4
    assert arithmetic(1, windows=(3,)).max_pages(0, [100]) == 3, "one token a step is the default"


def test_samples_share_the_pages_of_a_window_that_is_longer_than_their_prompt():
    """This is gemma-2-9b with 80 samples of 256 tokens after 4,096, the last of which each computes itself."""
    some = arithmetic(64, windows=(None, 4096), max_chunk=8192)
    assert some.max_pages(4096, [4096 + 255] * 80) == 2 * (63 + 80 * 5)


@pytest.mark.parametrize("is_fork", [False, True])
@given(block_size=st.integers(1, 5), window=st.integers(1, 12), max_chunk=st.integers(1, 9), start=st.integers(0, 40))
def test_no_chunk_after_any_token_needs_more_pages_than_a_window_is_said_to_take(
    is_fork, block_size, window, max_chunk, start
):
    """Pages are given back up to the page in which the chunk begins, and a fork has those of one token more.

    The bound is reached.
    """
    some = arithmetic(block_size, windows=(window,), max_chunk=max_chunk)

    def num_pages(start):
        first_seen = max(0, min(start - start % block_size - window + 1, start - window + (not is_fork)))
        return len({position // block_size for position in range(first_seen, start + max_chunk)})

    most = some.window_pages(window, is_fork=is_fork)
    assert num_pages(start) <= most
    assert max(num_pages(100 + at) for at in range(block_size)) == most


@given(
    block_size=st.integers(1, 5),
    window=st.integers(1, 12),
    max_chunk=st.integers(1, 9),
    fork_len=st.integers(1, 30),
    num_decoded=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_no_samples_have_more_pages_behind_a_window_than_they_are_said_to_take(
    block_size, window, max_chunk, fork_len, num_decoded
):
    """Each has decoded some tokens behind the common ones, of which it computes the last itself, and computes more."""
    some = arithmetic(block_size, windows=(window,), max_chunk=max_chunk)
    shared = (fork_len - 1) // block_size
    pages = set()
    for sample, count in enumerate(num_decoded):
        start = fork_len - 1 + count
        first_seen = max(0, start - start % block_size - window + 1)
        indices = {position // block_size for position in range(first_seen, start + max_chunk)}
        pages |= {(0 if index < shared else sample, index) for index in indices}
    assert len(pages) <= some.max_pages(fork_len, [fork_len - 1 + count + max_chunk for count in num_decoded])


@given(
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    max_chunk=st.integers(1, 9),
    num_pages=st.integers(0, 30),
    max_len=st.integers(1, 60),
)
def test_the_longest_sequence_that_a_pool_holds_is_the_longest_that_takes_no_more_pages(
    windows, max_chunk, num_pages, max_len
):
    some = arithmetic(4, windows=tuple(windows), max_chunk=max_chunk)
    longest = some.longest_len(num_pages, max_len)
    fitting = [length for length in range(1, max_len + 1) if some.max_pages(0, [length]) <= num_pages]
    assert longest == max(fitting, default=0)
