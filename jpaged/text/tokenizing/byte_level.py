"""The alphabet of byte-level tokenizers, in which each byte of a token is written as one printable character."""

from __future__ import annotations


def bytes_by_char() -> dict[str, int]:
    """Return the byte that each of the 256 characters of GPT-2's byte-level alphabet stands for.

    Printable Latin-1 characters stand for their own code points: "A" for 0x41. The characters from U+0100 stand for the
    other bytes in ascending order: "Ġ", U+0120, for the space 0x20.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
