"""JSON stays on one line, however its readers split lines."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from jpaged.commands.files.results import dump_line
from jpaged.json_lines import encode_json
from jpaged.serving.http.responses import json_response
from jpaged.serving.protocols.http_errors import HTTPError
from jpaged.serving.protocols.table import PROTOCOLS

ENDS = [chr(code) for code in range(0x110000) if len(f"a{chr(code)}b".splitlines()) == 2]
"""Every character at which `str.splitlines` ends a line."""
WRITERS: dict[str, Callable[[str], bytes | str]] = {
    "a value": encode_json,
    "a key": lambda text: encode_json({text: 5}),
    "a body": lambda text: json_response({"text": text}).body,
    **{
        f"an error at {protocol.path}": lambda text, write=protocol.error_body: write(
            HTTPError(400, "no", param=text), text
        )
        for protocol in PROTOCOLS
    },
    "a line of results": lambda text: dump_line({"text": text}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_no_character_of_a_text_ends_the_line(write: Callable[[str], bytes | str]):
    assert {"\x85", "\u2028", "\u2029"} < set(ENDS)
    for text in ("\\".join(ENDS) + "é", *ENDS):
        written = write(text)
        line = written if isinstance(written, str) else written.decode()
        assert len(line.splitlines()) == 1
        assert text in _texts(json.loads(line))


def test_other_characters_stay_as_they_are():
    text = "é\u2027\u202a\u0084\U00012028" + "x" * 100
    assert encode_json(text).decode() == dump_line(text) == f'"{text}"'  # type: ignore[arg-type]


def _texts(value: Any) -> list[str]:
    """Return all strings of a JSON value, keys included."""
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *_texts(inner))]
    return [value] if isinstance(value, str) else []
