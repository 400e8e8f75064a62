"""Chained hashes of full pages: SHA-256 over a page's tokens, all tokens before it, and all else that they depend on.

Python's own `hash` is neither stable between processes nor safe against a client who looks for collisions. Every
extra is tagged with its name and its length, so that no value of one can pass for another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256

from ..request import CacheKey


def root_hash(key: CacheKey) -> bytes:
    """Return the 32-byte hash that stands before the first page's tokens, from the fields of `key` except `items`.

    Each field that is not None is hashed with its name and its length in bytes, so that no value can pass for another
    field's. Requests with different keys therefore never share a page. `extend_hashes` hashes each of the `items` (such
    as images) with the page that it begins in.
    """
    digest = sha256(b"jpaged prefix v2")  # The version of this format: hashes of another format never match.
    for name in ("lora_name", "lora_version", "cache_salt", "weights_version"):
        value = getattr(key, name)
        if value is not None:
            data = str(value).encode()
            digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
    return digest.digest()


def extend_hashes(hashes: list[bytes], token_ids: array[int], num_pages: int, page_size: int, key: CacheKey) -> None:
    """Append hashes of full pages of `token_ids` to `hashes` until it holds `num_pages` hashes.

    `hashes` may already hold the hashes of the first pages; if it holds enough, it does not change. Each hash has 32
    bytes. `page_size` is in tokens, and `token_ids` has at least `num_pages` × `page_size` of them. A page's hash is
    SHA-256 over the hash of the page before it (of `key` for the first page), the page's tokens as int32, and the
    offset and content hash of each of `key.items` (such as an image) that begins in the page.
    """
    first_page = len(hashes)
    if first_page >= num_pages:
        return
    parent = hashes[-1] if hashes else root_hash(key)
    data = token_ids[first_page * page_size : num_pages * page_size].tobytes()
    page_bytes = token_ids.itemsize * page_size
    extras = _extras(key.items, page_size) if key.items else {}  # Page index → bytes to hash after its tokens.
    for index in range(first_page, num_pages):
        offset = (index - first_page) * page_bytes
        message = parent + data[offset : offset + page_bytes]
        if extras:
            message += extras.get(index, b"")
        parent = sha256(message).digest()
        hashes.append(parent)


def _extras(items: Iterable[tuple[int, bytes]], page_size: int) -> dict[int, bytes]:
    """Return page index → bytes to hash with its tokens: offset and SHA-256 of each item that begins in the page."""
    extras: dict[int, bytes] = {}
    for position, content in items:
        page, offset = divmod(position, page_size)
        extras[page] = extras.get(page, b"") + offset.to_bytes(4, "little") + sha256(content).digest()
    return extras
