"""What a full page is found by: a SHA-256 chain over its tokens, all tokens before, and all else they depend on.

Python's own `hash` is neither stable nor safe against a client who looks for collisions. Every extra is tagged
with its name and its length, so that no value of one can pass for another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What keys and values depend on besides tokens: requests with different ones share no page."""

    lora_name: str | None = None
    lora_version: int = 0
    """Counts the loadings of an adapter under its name."""
    cache_salt: str | None = None
    """A tenant's secret, so that nobody can learn from latency what others have asked."""
    weights_version: int = 0
    items: tuple[tuple[int, bytes], ...] = ()
    """(position, content hash) of what stands in for tokens, such as images, in order of position."""

    def root(self) -> bytes:
        """Where the chain of these extras begins. `items` come in with the pages that they begin in."""
        digest = sha256(b"jpaged prefix v2")
        for name in ("lora_name", "lora_version", "cache_salt", "weights_version"):
            value = getattr(self, name)
            if value is not None:
                data = str(value).encode()
                digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
        return digest.digest()


NO_EXTRAS = CacheKey()
"""Nothing but tokens."""


def extend_hashes(hashes: list[bytes], token_ids: array[int], num_pages: int, page_size: int, key: CacheKey) -> None:
    """Append to `hashes`, those of the first pages of `token_ids`, until there are `num_pages` of them."""
    first = len(hashes)
    if first >= num_pages:
        return
    parent = hashes[-1] if hashes else key.root()
    data = token_ids[first * page_size : num_pages * page_size].tobytes()
    width = token_ids.itemsize * page_size
    extras = _extras(key.items, page_size) if key.items else {}
    for index in range(first, num_pages):
        start = (index - first) * width
        page = parent + data[start : start + width]
        if extras:
            page += extras.get(index, b"")
        parent = sha256(page).digest()
        hashes.append(parent)


def _extras(items: Iterable[tuple[int, bytes]], page_size: int) -> dict[int, bytes]:
    """Page → what is hashed with its tokens: offset and digest of every item that begins in it."""
    extras: dict[int, bytes] = {}
    for position, content in items:
        page, offset = divmod(position, page_size)
        extras[page] = extras.get(page, b"") + offset.to_bytes(4, "little") + sha256(content).digest()
    return extras
