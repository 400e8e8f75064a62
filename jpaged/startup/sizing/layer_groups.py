"""Page-table groups: which layers of a model share page tables, and where the pages of each layer lie.

Layers that see the same tokens keep and give back the same pages, so they can share a page table. A page has room for
the keys and values of one group, whichever group it belongs to, so groups are made nearly equal in size:

    10 layers of full attention     group 0: 10 layers              a page: 13 layers × its tokens,
    52 layers with a window         groups 1 to 4: 13 layers each   room for 3 layers unused in group 0

Smaller groups leave less room unused, but each group has a page table for every sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    """Form groups of nearly equal size with the least padding, which is groups × largest size − layers.

    Of ways with equal padding the one is taken in which full attention, whose pages are never given back, has the least
    of it, and of these the one with fewest groups. ConfigError for more than `MAX_GROUPS` different
    windows, and for a layer that reads the keys and values of a layer with another window.
    """
    counts = Counter(layer.window for layer in layers if layer.pages_of is None)
    counts = Counter({window: counts[window] for window in sorted(counts, key=lambda window: window or 0)})
    if len(counts) > MAX_GROUPS:
        raise ConfigError(
            f"model: its attention layers have {len(counts)} different windows ({', '.join(map(_shown, counts))}), "
            f"allowed: at most {MAX_GROUPS}, since each takes a page-table group of its own"
        )
    windows = _windows_of_groups(counts)
    places: list[tuple[int, int]] = []
    num_placed: Counter[int | None] = Counter()
    for index, layer in enumerate(layers):
        window = layer.window
        if layer.pages_of is not None:
            _check_owner(index, layer, layers[layer.pages_of])
            places.append(places[layer.pages_of])
            continue
        # The layers of a window are dealt to its groups in turn.
        turn, group = divmod(num_placed[window], windows.count(window))
        places.append((windows.index(window) + group, turn))
        num_placed[window] += 1
    return LayerGroups(windows, _largest_size(counts, windows), tuple(places))


def _windows_of_groups(counts: Counter[int | None]) -> tuple[int | None, ...]:
    """Return the window of each group, for the number of layers of each window; equal windows are neighbours."""
    ways = [
        tuple(window for window, count in counts.items() for _ in range(-(-count // size)))
        for size in range(1, max(counts.values()) + 1)
    ]

    def cost(way: tuple[int | None, ...]) -> tuple[int, int, int]:
        # The number of layers is the same for all ways, so the least room is the least padding.
        size = _largest_size(counts, way)
        return len(way) * size, way.count(None) * size, len(way)

    return min((way for way in ways if len(way) <= MAX_GROUPS), key=cost)


def _largest_size(counts: Counter[int | None], windows: tuple[int | None, ...]) -> int:
    """Return the layers of the largest group if each window's layers are spread evenly over its groups."""
    return max(-(-count // windows.count(window)) for window, count in counts.items())


def _check_owner(index: int, layer: AttentionLayer, owner: AttentionLayer) -> None:
    """Raise ConfigError for a layer whose window is not that of the layer whose keys and values it reads."""
    if owner.window != layer.window:
        raise ConfigError(
            f"model: layer {index} with {_shown(layer.window)} reads the keys and values of layer {layer.pages_of} "
            f"with {_shown(owner.window)}, wanted: the same for both, since they have the same pages"
        )


def _shown(window: int | None) -> str:
    return "full attention" if window is None else f"a window of {window}"
