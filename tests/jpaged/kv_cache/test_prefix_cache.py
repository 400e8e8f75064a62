"""The prefix cache: finding, pinning, counting and forgetting pages."""

import hashlib

import pytest

from jpaged.kv_cache.prefix_hash import root_hash
from jpaged.request import CacheKey

from ..invariants import check_pages
from ..shrinking_pool import withdraw
from .test_block_manager import KEY, adopt, found, manager, release, sequence_of, start


def evicted_to_host(blocks, token_ids):
    """Publish these tokens, and let the device evict their pages to the host pool."""
    release(blocks, start(blocks, token_ids))
    others = [blocks.store.take() for _ in range(blocks.device.num_free)]
    for page in others:
        blocks.device.drop_ref(page)
    blocks.store.take_moves()


def test_a_match_needs_the_free_pages_that_it_finds_and_one_for_each_page_of_the_host():
    blocks = manager(num_blocks=1 + 6, block_size=2, num_host_blocks=10)
    evicted_to_host(blocks, [1, 2, 3, 4])
    used = start(blocks, [1, 2, 9])
    other = sequence_of([1, 2, 3, 4, 5])
    match = blocks.prefixes.match(other, 4)
    assert (match.num_pages, len(match.host_pages)) == (2, 1)
    assert (blocks.prefixes.num_shared(match), blocks.prefixes.num_free_needed(match)) == (1, 1)
    release(blocks, used)
    assert (blocks.prefixes.num_shared(match), blocks.prefixes.num_free_needed(match)) == (0, 2)
    num_free = blocks.device.num_free
    assert adopt(blocks, other, match) == 4
    assert num_free - blocks.device.num_free == 2
    assert blocks.store.counts["host_hit"] == 2  # Page one came back for `used`, page two for this one.


def test_a_match_names_the_first_missing_page_until_it_is_cached():
    blocks = manager(num_blocks=20, block_size=2, windows=(None, None), num_host_blocks=20)
    release(blocks, start(blocks, [1, 2, 3, 4]))
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 8], num_groups=2)
    match = blocks.prefixes.match(sequence, 8)
    assert (match.num_pages, match.missing_hash) == (2, sequence.prefix.hashes[2])
    assert not blocks.prefixes.has_page(match.missing_hash)
    release(blocks, start(blocks, [1, 2, 3, 4, 5, 6]))
    assert blocks.prefixes.has_page(match.missing_hash)
    assert blocks.prefixes.match(sequence, 6).missing_hash is None, "no longer match was asked for"
    for page in [blocks.store.take() for _ in range(blocks.device.num_free)]:
        blocks.device.drop_ref(page)
    assert not blocks.device.page_of
    assert blocks.prefixes.has_page(match.missing_hash), "the host pool has it"


def test_pages_of_a_window_are_found_in_the_host_pool_too():
    blocks = manager(num_blocks=1 + 8, block_size=2, windows=(None, 3), num_host_blocks=10)
    evicted_to_host(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert not blocks.device.page_of
    match = blocks.prefixes.match(sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9], num_groups=2), 8)
    assert match.num_pages == 4
    assert [(group, index) for group, index, _ in match.host_pages] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_without_prefix_caching_nothing_is_found_counted_or_published():
    blocks = manager(num_blocks=20, block_size=2, enable_prefix_caching=False)
    release(blocks, start(blocks, [1, 2, 3, 4]))
    blocks.prefixes.count_query(4, 0)
    assert found(blocks, [1, 2, 3, 4]) == 0
    assert not blocks.device.page_of
    assert (blocks.prefixes.num_queried_tokens, blocks.prefixes.num_hit_tokens) == (0, 0)


@pytest.mark.parametrize(("num_tokens", "num_pinned"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 2)])
@pytest.mark.parametrize(("windows", "per_page", "kept"), [((None,), 1, 2), ((None, None), 2, 4), ((None, 3), 1, 3)])
def test_pinned_pages_of_a_sequence_count_in_the_groups_that_keep_them(num_tokens, num_pinned, windows, per_page, kept):
    blocks = manager(num_blocks=40, block_size=2, windows=windows)
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 8], num_groups=len(windows))
    assert blocks.prefixes.num_pinned(sequence, num_tokens) == 0
    blocks.prefixes.pin([1, 2, 3, 4], KEY)
    assert blocks.prefixes.num_pinned(sequence, num_tokens) == num_pinned * per_page
    assert blocks.prefixes.num_pinned(sequence_of([1, 2, 9, 9]), 4) == per_page
    assert blocks.num_available == 39 - kept


def test_a_pin_keeps_only_the_pages_of_a_window_that_a_query_behind_the_prefix_sees():
    """Behind four pages of two tokens a window of 3 sees the last of them."""
    blocks = manager(num_blocks=40, block_size=2, windows=(None, 3))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    assert blocks.prefixes.num_new_pins(tokens, KEY) == 4 + 1
    assert blocks.prefixes.pin(tokens, KEY) == 0
    assert (blocks.num_pinned, blocks.prefixes.num_new_pins(tokens[:4], KEY)) == (5, 1)
    sequence = start(blocks, [*tokens, 9])
    blocks.pass_windows(sequence, 8)
    release(blocks, sequence)
    assert blocks.device.num_used == 5
    assert blocks.prefixes.pin(tokens, KEY) == 8
    for page in [blocks.store.take() for _ in range(blocks.device.num_free)]:
        blocks.device.drop_ref(page)
    assert [found(blocks, tokens[:num_tokens]) for num_tokens in (8, 7)] == [4, 0]
    assert all(blocks.prefixes.unpin(tokens, KEY) for _ in range(2))
    assert (blocks.num_pinned, blocks.device.num_used) == (0, 0)


# Pages that a window passes before a token shows that they are sound.


TOKENS = list(range(12))


def computed(blocks):
    """Return a sequence of six pages that are computed; a window has passed four of them, and no token is drawn."""
    sequence = start(blocks, TOKENS, compute=False)
    sequence.num_computed = len(TOKENS)
    blocks.pass_windows(sequence, 11)
    assert sequence.num_passed == [0, 4]
    return sequence


def take_free_pages(blocks):
    for page in [blocks.store.take() for _ in range(blocks.device.num_free)]:
        blocks.device.drop_ref(page)


def test_pages_that_a_window_has_passed_are_free_and_are_found_once_they_are_known_to_be_sound():
    blocks = manager(num_blocks=1 + 20, block_size=2, windows=(None, 3))
    sequence = computed(blocks)
    assert (blocks.device.num_used, found(blocks, TOKENS)) == (6 + 2, 0)
    blocks.prefixes.publish(sequence, len(TOKENS))
    assert [found(blocks, TOKENS[:num_tokens]) for num_tokens in range(2, 14, 2)] == [1, 2, 3, 4, 5, 6]
    assert blocks.device.num_used == 6 + 2
    check_pages(blocks, [sequence], [])


def test_pages_that_a_window_has_passed_are_taken_after_empty_ones_and_after_older_prefixes():
    blocks = manager(num_blocks=1 + 15, block_size=2, windows=(None, 3))
    release(blocks, start(blocks, [50, 51]))
    sequence = computed(blocks)  # An empty page is left, the two of the other prefix, and the passed ones.
    for _ in range(3):
        blocks.store.take()
    assert found(blocks, [50, 51]) == 0
    blocks.prefixes.publish(sequence, len(TOKENS))
    assert [found(blocks, TOKENS[:num_tokens]) for num_tokens in (2, 4, 6, 8)] == [1, 2, 3, 4]


LOSSES = {
    "they were taken": take_free_pages,
    "they are in use": lambda blocks: [blocks.store.take() for _ in range(blocks.device.num_free)],
    "the cache was reset": lambda blocks: blocks.prefixes.reset(),
    "the pool has become smaller": lambda blocks: withdraw(blocks.device, blocks.device.num_free),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())
def test_a_page_that_a_window_has_passed_is_not_published_if_it_is_not_what_it_was(lose):
    blocks = manager(num_blocks=1 + 20, block_size=2, windows=(None, 3))
    sequence = computed(blocks)
    lose(blocks)
    blocks.prefixes.publish(sequence, len(TOKENS))
    # The fifth and the sixth page are the sequence's still, and the next query sees only the last one.
    assert [blocks.prefixes.will_have(sequence, num_pages) for num_pages in range(1, 7)] == [False] * 4 + [True] * 2
    assert [found(blocks, TOKENS[:num_tokens]) for num_tokens in range(2, 14, 2)] == [0, 0, 0, 0, 5, 6]


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"max_cached_blocks": 0}], ids=["off", "none"])
def test_no_page_that_a_window_has_passed_is_kept_where_no_free_page_keeps_a_prefix(options):
    blocks = manager(num_blocks=1 + 20, block_size=2, windows=(None, 3), **options)
    sequence = computed(blocks)
    assert not blocks.device.cached
    blocks.prefixes.publish(sequence, len(TOKENS))
    assert found(blocks, TOKENS[:8]) == 0


def test_pages_that_a_window_has_passed_become_empty_if_another_sequence_publishes_the_same_or_this_one_ends():
    blocks = manager(num_blocks=1 + 40, block_size=2, windows=(None, 3))
    first, second, third = (computed(blocks) for _ in range(3))
    assert len(blocks.device.cached) == 3 * 4
    blocks.prefixes.publish(first, len(TOKENS))
    blocks.prefixes.publish(second, len(TOKENS))
    release(blocks, third)
    assert len(blocks.device.cached) == 4
    check_pages(blocks, [first, second], [])


def test_a_pinned_page_that_a_window_has_passed_is_kept_once_it_is_known_to_be_sound():
    """Behind the pinned eight tokens the window sees the fourth page."""
    blocks = manager(num_blocks=1 + 20, block_size=2, windows=(None, 3))
    assert blocks.prefixes.pin(TOKENS[:8], KEY) == 0
    sequence = computed(blocks)
    blocks.prefixes.publish(sequence, len(TOKENS))
    release(blocks, sequence)
    assert blocks.device.num_used == 4 + 1
    take_free_pages(blocks)
    assert found(blocks, TOKENS[:8]) == 4
    check_pages(blocks, [], [])


def test_an_unsound_prefix_is_forgotten_in_both_pools_even_if_it_is_pinned():
    blocks = manager(num_blocks=20, block_size=2, num_host_blocks=20)
    blocks.prefixes.pin([1, 2], KEY)
    sequence = start(blocks, [1, 2, 3, 4])
    blocks.host.drop_ref(blocks.store.swap_out(sequence.pages[0][0]))
    assert blocks.host.page_of
    blocks.prefixes.discard(sequence)
    assert not blocks.store.pinned_pages
    assert not blocks.device.page_of
    assert not blocks.host.page_of
    release(blocks, sequence)
    assert (blocks.device.num_used, blocks.host.num_used) == (0, 0)


def test_a_reset_forgets_everything_and_is_counted():
    blocks = manager(num_blocks=20, block_size=2, num_host_blocks=20)
    blocks.prefixes.pin([1, 2], KEY)
    release(blocks, start(blocks, [1, 2, 3, 4]))
    for count in (1, 2):
        blocks.prefixes.reset()
        assert blocks.store.counts["reset"] == count
        assert (blocks.device.num_used, blocks.device.page_of, blocks.store.pinned_pages) == (0, {}, {})
    release(blocks, start(blocks, [1, 2, 3, 4]))
    assert len(blocks.store.pinned_pages) == 1, "the pin holds for pages computed anew"


def test_each_extra_makes_other_prefixes():
    """This is P3: a salt cannot be taken for an adapter's name, nor a name for a name and a version."""
    keys = [
        CacheKey(),
        CacheKey(lora_name="a"),
        CacheKey(lora_name="b"),
        CacheKey(lora_name="a", lora_version=1),
        CacheKey(cache_salt="a"),
        CacheKey(cache_salt="a\0lora_name\x001\0b"),
        CacheKey(weights_version=1),
        CacheKey(lora_name="a1"),
        CacheKey(lora_name="a", cache_salt="a"),
    ]
    assert len({root_hash(key) for key in keys}) == len(keys)


def test_an_item_and_its_offset_are_hashed_with_the_page_that_it_begins_in():
    """P3: after a page's token ids come offset, in 4 bytes, and digest of each item, in order."""
    items = ((1, b"image"), (3, b"sound"), (3, b"more"))
    key = CacheKey(items=items)
    blocks = manager(block_size=2)
    sequence = sequence_of([1, 2, 3, 4, 5])
    sequence.request.cache_key = key
    blocks.prefixes.match(sequence, 4)
    digest = hashlib.sha256(b"jpaged prefix v2\0lora_version\x001\x000\0weights_version\x001\x000").digest()
    expected = []
    for page, contents in enumerate(([b"image"], [b"sound", b"more"])):
        data = b"".join(token.to_bytes(4, "little") for token in (2 * page + 1, 2 * page + 2))
        for content in contents:
            data += (1).to_bytes(4, "little") + hashlib.sha256(content).digest()
        digest = hashlib.sha256(digest + data).digest()
        expected.append(digest)
    assert sequence.prefix.hashes == expected
