"""How many pages a request takes, now and at most, and how much of it the prefix cache may give."""

from array import array

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.kv_cache.page_demand import PageDemand
from jpaged.messages import Scoring
from jpaged.request import CacheKey
from jpaged.sampling.sampling_params import SamplingParams

from ..host_requests import new_request


def blocks_of(num_pages=20, *, windows=(None,), max_chunk=1):
    return BlockManager(num_blocks=1 + num_pages, arithmetic=PageArithmetic(windows, 4, max_chunk))


def request_of(prompt_len, max_tokens, n=1, prompt_logprobs=None, **options):
    return new_request(
        range(100, 100 + prompt_len),
        params=SamplingParams(n=n, prompt_logprobs=prompt_logprobs),
        max_tokens=max_tokens,
        **options,
    )


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "n", "num_pages"),
    [
        (10, 7, 1, 4),  # 17 tokens, of which the last one's keys are never computed: 16.
        (10, 8, 1, 5),
        (10, 7, 2, 2 + 2 * 2),  # Two full pages of the prompt are shared.
        (8, 1, 2, 1 + 2 * 1),  # Each computes the prompt's last token anew, in a page of its own.
        (9, 1, 2, 2 + 2 * 1),
    ],
)
def test_max_pages_holds_all_but_the_last_token_of_each_sample(prompt_len, max_tokens, n, num_pages):
    assert PageDemand(blocks_of()).max_pages(request_of(prompt_len, max_tokens, n)) == num_pages


def test_pages_now_holds_the_tokens_that_the_request_has():
    demand = PageDemand(blocks_of())
    request = request_of(8, 30)
    assert demand.pages_now(request) == 2
    request.live[0].num_tokens += 1
    assert demand.pages_now(request) == 3
    assert demand.pages_now(request_of(9, 30, n=2)) == 2 + 2


def test_pages_now_counts_for_windows_what_is_still_to_be_computed():
    """A window of 8 sees 2 pages before the current one; 32, 4 and 1 tokens touch at most 9, 2 and 1 pages."""
    demand = PageDemand(blocks_of(windows=(None, 8), max_chunk=32))
    request = request_of(60, 30)
    assert demand.pages_now(request) == 15 + 2 + 9
    assert demand.pages_now(request, num_cached=56) == 15 + 2 + 2
    request.live[0].num_computed = 59
    assert demand.pages_now(request) == 15 + 2 + 1
    # The other sample has its first 59 tokens from the first one.
    forked = request_of(60, 30, n=2)
    forked.live[0].num_computed = 59
    assert demand.pages_now(forked) == 14 + 2 * 1 + 2 * (2 + 1)
    forked.live[1].num_tokens = 70
    assert demand.pages_now(forked) == 14 + (1 + 4) + 2 * (2 + 4)


@pytest.mark.parametrize(("prompt_len", "num_found"), [(12, 2), (13, 3), (14, 3)])
def test_pinned_pages_of_the_prompt_are_not_counted(prompt_len, num_found):
    """The page with the prompt's last token is counted: the request computes it itself."""
    blocks = blocks_of()
    blocks.prefixes.pin(list(range(100, 200)), CacheKey())
    demand = PageDemand(blocks)
    num_pages = PageDemand(blocks_of()).max_pages(request_of(prompt_len, 6))
    for prompt_logprobs, num_pinned in ((None, num_found), (0, 0)):
        request = request_of(prompt_len, 6, prompt_logprobs=prompt_logprobs)
        assert demand.max_pages(request) == num_pages - num_pinned


@pytest.mark.parametrize(("num_pages", "fits"), [(4, True), (3, False)])
def test_a_request_is_accepted_if_it_could_run_to_its_end_alone(num_pages, fits):
    demand = PageDemand(blocks_of(num_pages))
    request = request_of(10, 7)
    assert demand.fits_alone(request) is fits
    if fits:
        demand.check(request, max_num_seqs=1)
        return
    message = (
        "prompt: got 10 tokens and up to 7 more for each of 1 samples, which take 4 pages, allowed: 3 pages of 4 tokens"
    )
    with pytest.raises(InvalidRequestError, match=message) as caught:
        demand.check(request, max_num_seqs=1)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("windows", "num_pinned", "groups"), [((None,), 3, ""), ((None, 20), 6, " in 2 groups of layers")]
)
def test_a_refusal_for_lack_of_pages_mentions_pinned_ones_and_groups_of_layers(windows, num_pinned, groups):
    blocks = blocks_of(3 + num_pinned, windows=windows)
    blocks.prefixes.pin(list(range(500, 512)), CacheKey())
    pinned = f"beside {num_pinned} pinned ones, which unpin_prefix gives back"
    with pytest.raises(InvalidRequestError, match=f"allowed: 3 pages of 4 tokens{groups} {pinned}; shorten"):
        PageDemand(blocks).check(request_of(10, 7), max_num_seqs=1)


@pytest.mark.parametrize(("windows", "num_left"), [((None,), 1), ((None, 8, 8), 3)])
def test_a_pin_leaves_a_page_of_each_group_where_there_is_no_request(windows, num_left):
    demand = PageDemand(blocks_of(10, windows=windows))
    demand.check_pin(10 - num_left, [])
    with pytest.raises(InvalidRequestError, match=f"since {num_left} of 10 must be left for requests"):
        demand.check_pin(11 - num_left, [])


def test_a_fork_counts_pinned_pages_as_samples_do():
    """Three samples share 2 pinned pages and take 2 more each, whether they came together or one by one."""
    for num_pages, fits in ((2 + 6, True), (2 + 5, False)):
        blocks = blocks_of(num_pages)
        blocks.prefixes.pin(list(range(100, 108)), CacheKey())
        demand = PageDemand(blocks)
        assert demand.fits_alone(request_of(10, 7, n=3)) is fits
        parent = request_of(10, 7).live[0]
        if fits:
            demand.check_fork(parent, 2, max_num_seqs=3)
        else:
            with pytest.raises(InvalidRequestError, match="up to 6 pages, allowed: 5 pages of 4 tokens beside 2"):
                demand.check_fork(parent, 2, max_num_seqs=3)


def test_a_request_has_at_most_as_many_samples_as_there_are_slots():
    demand = PageDemand(blocks_of())
    demand.check(request_of(4, 4, n=2), max_num_seqs=2)
    with pytest.raises(InvalidRequestError, match="n: got 3, allowed: at most max_num_seqs, 2") as caught:
        demand.check(request_of(4, 4, n=3), max_num_seqs=2)
    assert caught.value.param == "n"


def test_the_last_token_of_a_sequence_is_never_taken_from_the_cache():
    """Only a computed token yields logits."""
    demand = PageDemand(blocks_of())
    first = request_of(10, 7).live[0]
    assert demand.match_limit(first) == 9
    first.num_tokens += 3
    assert demand.match_limit(first) == 12


def test_with_prompt_scores_only_scored_positions_may_come_from_the_cache():
    demand, request = PageDemand(blocks_of()), request_of(10, 7, prompt_logprobs=0)
    for num_scored, limit in ((0, 0), (6, 6), (9, 9), (10, 9)):
        request.num_scored = num_scored
        assert demand.match_limit(request.live[0]) == limit


def test_of_a_sample_that_is_scored_what_comes_before_its_first_score_may_come_from_the_cache():
    """The logits of the context's last token score the first one of the continuation."""
    scoring = Scoring(continuations=(array("i", [7, 8, 9]).tobytes(),), temperatures=(1.0,), first=1)
    demand, request = PageDemand(blocks_of()), request_of(10, 3, scoring=scoring)
    (sample,) = request.live
    assert (list(sample.token_ids[10:]), sample.max_len, sample.num_scored) == ([7, 8], 13, 10)
    for num_scored, limit in ((9, 9), (10, 10), (12, 11)):
        sample.num_scored = num_scored
        assert demand.match_limit(sample) == limit


@pytest.mark.parametrize(("windows", "limit"), [((None,), 14), ((None, 6), 9)])
def test_with_windows_no_token_that_a_child_has_still_to_see_comes_from_the_cache(windows, limit):
    """The child computes the last of ten common tokens itself, and sees the tokens before it."""
    demand, request = PageDemand(blocks_of(windows=windows)), request_of(10, 7, n=2)
    request.live[0].num_tokens = 15
    assert demand.match_limit(request.live[0]) == limit
