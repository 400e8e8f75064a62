"""Page-table groups: which layers of a model share page tables, and where the pages of each layer lie.

Layers that see the same tokens keep and give back the same pages, so they can share a page table. A page has room for
the keys and values of one group, whichever group it belongs to, so groups are made nearly equal in size:

    10 layers of full attention     group 0: 10 layers              a page: 13 layers × its tokens,
    52 layers with a window         groups 1 to 4: 13 layers each   room for 3 layers unused in group 0

Smaller groups leave less room unused, but each group has a page table for every sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ...models.config.spec import AttentionLayer

MAX_GROUPS = 8
"""Most page-table groups of a model: every sequence has a page table in each, and every step a slot mapping."""


@dataclass(frozen=True)
class LayerGroups:
    """The page-table groups of a model; groups of full attention come first."""

    windows: tuple[int | None, ...]
    """Window of the layers of each group in tokens; None for full attention."""
    num_layers: int
    """Layers of the largest group, for as many of which a page has room."""
    places: tuple[tuple[int, int], ...]
    """(group, index in the group) of each layer; a layer that reads another's keys and values has the other's."""


def group_layers(layers: Sequence[AttentionLayer]) -> LayerGroups:
    """Assign each attention layer to a page-table group, such that a group has layers of one window only.

    Every page has room for the layers of the largest group, so the padding is groups × largest size − layers. The
    groups are chosen with the least padding. Ties go to the least padding under full attention, whose pages are kept as
    long as the sequence, then to the fewest groups. Raises ConfigError if there are more than MAX_GROUPS different
    windows, or if a layer reads the keys and values of a layer with another window.

    Example: layers with the windows None (full attention), 512, 512, None, 512, 512 get the groups (None, 512, 512) of
    2 layers each. Their places (group, index in the group) are (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1).
    """
    layer_counts = Counter(layer.window for layer in layers if layer.pages_of is None)
    windows_in_order = sorted(layer_counts, key=lambda window: window or 0)  # Full attention, None, comes first.
    num_layers_of = {window: layer_counts[window] for window in windows_in_order}
    if len(num_layers_of) > MAX_GROUPS:
        shown_windows = ", ".join(map(_shown, num_layers_of))
        fault = f"its attention layers have {len(num_layers_of)} different windows ({shown_windows})"
        allowed = f"at most {MAX_GROUPS}, since each takes a page-table group of its own"
        raise ConfigError(f"model: {fault}, allowed: {allowed}")
    windows = _windows_of_groups(num_layers_of)
    places: list[tuple[int, int]] = []
    num_placed: Counter[int | None] = Counter()
    for index, layer in enumerate(layers):
        window = layer.window
        if layer.pages_of is not None:  # The index of an earlier layer, whose keys and values this one reads.
            _check_owner(index, layer, layers[layer.pages_of])
            places.append(places[layer.pages_of])
            continue
        # The layers of a window are dealt to its groups in turn: with two groups 0, 1, 0, 1 …
        index_in_group, group_of_window = divmod(num_placed[window], windows.count(window))
        places.append((windows.index(window) + group_of_window, index_in_group))
        num_placed[window] += 1
    return LayerGroups(windows, _max_group_layers(num_layers_of, windows), tuple(places))


def _windows_of_groups(num_layers_of: Mapping[int | None, int]) -> tuple[int | None, ...]:
    """Return the window of each group in the best partition; groups of the same window are neighbours.

    `num_layers_of` maps each of at most MAX_GROUPS windows to its number of layers. Every cap on the layers of a group
    (`max_layers`) is tried, and gives each window ⌈its layers ÷ cap⌉ groups: {None: 2, 512: 5} with a cap of 3 gives
    (None, 512, 512). Of the partitions with at most MAX_GROUPS groups, the one with the least `cost` is returned. There
    is always one: the highest cap gives each window a single group.
    """
    partitions = [
        tuple(window for window, num_layers in num_layers_of.items() for _ in range(-(-num_layers // max_layers)))
        for max_layers in range(1, max(num_layers_of.values()) + 1)
    ]

    def cost(windows: tuple[int | None, ...]) -> tuple[int, int, int]:
        # Compared in this order: room for layers in a page of each group, added up; the part of this room under full
        # attention; the number of groups. All partitions have the same layers, so the least room is the least padding.
        max_layers = _max_group_layers(num_layers_of, windows)
        return len(windows) * max_layers, windows.count(None) * max_layers, len(windows)

    return min((windows for windows in partitions if len(windows) <= MAX_GROUPS), key=cost)


def _max_group_layers(num_layers_of: Mapping[int | None, int], windows: tuple[int | None, ...]) -> int:
    """Return the layers of the largest group if each window's layers are spread evenly over its groups."""
    return max(-(-num_layers // windows.count(window)) for window, num_layers in num_layers_of.items())


def _check_owner(index: int, layer: AttentionLayer, owner: AttentionLayer) -> None:
    """Raise ConfigError for a layer whose window is not that of the layer whose keys and values it reads."""
    if owner.window != layer.window:
        other = f"the keys and values of layer {layer.pages_of} with {_shown(owner.window)}"
        wanted = "the same for both, since they have the same pages"
        raise ConfigError(f"model: layer {index} with {_shown(layer.window)} reads {other}, wanted: {wanted}")


def _shown(window: int | None) -> str:
    return "full attention" if window is None else f"a window of {window}"
