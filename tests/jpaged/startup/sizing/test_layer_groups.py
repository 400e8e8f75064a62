"""Layers of equal windows share page-table groups of nearly equal size, and a shared layer its owner's place."""

import re
from collections import Counter
from itertools import cycle, islice

import pytest

from jpaged.errors import ConfigError
from jpaged.models.config.spec import AttentionLayer
from jpaged.startup.sizing.layer_groups import MAX_GROUPS, group_layers


def layers_of(windows, pages_of=None):
    """Return layers with these windows; `pages_of` maps a layer to the layer whose keys and values it reads."""
    owners = pages_of or {}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
    return [AttentionLayer(**heads, window=window, pages_of=owners.get(i)) for i, window in enumerate(windows)]


CASES = {
    "full attention alone": ([None] * 32, (None,), 32),
    "one window alone": ([4096] * 32, (4096,), 32),
    "two kinds that alternate": ([8, None] * 21, (None, 8), 21),
    "one full layer in six, of 62": (list(islice(cycle([512] * 5 + [None]), 62)), (None, *[512] * 4), 13),
    "one full layer in six, of 26": (list(islice(cycle([512] * 5 + [None]), 26)), (None, *[512] * 6), 4),
    "one full layer in four, of 48": ([8192, 8192, 8192, None] * 12, (None, *[8192] * 3), 12),
    "equal padding, less for full attention": ([None, *[8] * 20], (None, *[8] * 7), 3),
    "three windows": ([None] * 4 + [16] * 4 + [8] * 4, (None, 8, 16), 4),
    "as many windows as there may be groups": ([*range(1, MAX_GROUPS + 1)] * 3, tuple(range(1, MAX_GROUPS + 1)), 3),
}


@pytest.mark.parametrize(("windows", "groups", "size"), CASES.values(), ids=CASES.keys())
def test_groups_have_one_window_each_and_as_little_padding_as_possible(windows, groups, size):
    found = group_layers(layers_of(windows))
    assert (found.windows, found.num_layers) == (groups, size)
    assert [found.windows[group] for group, _ in found.places] == windows
    assert len(set(found.places)) == len(windows), "two layers in one place"
    sizes = Counter(group for group, _ in found.places)
    assert max(sizes.values()) == size
    for group, index in found.places:
        assert index < sizes[group], "places of a group are not its first ones"


def test_a_layer_that_writes_no_keys_has_the_place_of_the_layer_that_it_reads():
    found = group_layers(layers_of([8, None, 8, None, 8, 8], {4: 2, 5: 4}))
    assert (found.windows, found.num_layers) == ((None, 8), 2)
    assert found.places == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 1), (1, 1))


def test_windows_that_no_groups_can_serve_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"9 different windows \(full attention, a window of 1, .*: at most 8"):
        group_layers(layers_of([*range(1, 9), None]))
    wanted = "layer 1 with a window of 8 reads the keys and values of layer 0 with full attention"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        group_layers(layers_of([None, 8], {1: 0}))
