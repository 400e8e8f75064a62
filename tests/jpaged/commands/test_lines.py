"""Lines of files and pipes, and the memory that a long file takes."""

import os
import random
import sys
import time

import pytest

from jpaged.commands.lines import READ_BYTES, HashTable, LineSource
from jpaged.commands.results import ResultFile
from jpaged.commands.resume import FinishedRecords
from jpaged.errors import ConfigError

TEXTS = {
    "ends of lines": (b"a\nb\r\n\n \t\nc", [(1, b"a"), (2, b"b"), (5, b"c")]),
    "nothing": (b"", []),
    "blank lines": (b"\n\n\r\n", []),
    "a line of several reads": (b"x" * (2 * READ_BYTES + 7) + b"\ny", [(1, b"x" * (2 * READ_BYTES + 7)), (2, b"y")]),
    "a read that ends with a line": (b"x" * (READ_BYTES - 1) + b"\ny\n", [(1, b"x" * (READ_BYTES - 1)), (2, b"y")]),
}


@pytest.mark.parametrize(("text", "lines"), TEXTS.values(), ids=TEXTS.keys())
def test_lines_are_numbered_as_they_stand_in_the_file(text, lines, tmp_path):
    (tmp_path / "p.txt").write_bytes(text)
    assert list(LineSource(str(tmp_path / "p.txt"))) == lines


def test_a_pipe_gives_what_is_there_and_says_when_nothing_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    source = LineSource(str(tmp_path / "pipe"))
    assert source.format == "jsonl"
    source.wait_s = lambda: 0.0
    lines = iter(source)
    assert next(lines) is None
    os.write(writer, b"one\ntw")
    assert next(lines) == (1, b"one")
    assert [next(lines), next(lines)] == [None, None]
    os.write(writer, b"o\n\nthree")
    assert next(lines) == (2, b"two")
    source.wait_s = lambda: 0.05
    start = time.monotonic()
    assert next(lines) is None
    assert time.monotonic() - start > 0.04
    os.close(writer)
    source.wait_s = lambda: None
    assert list(lines) == [(4, b"three")]


@pytest.mark.parametrize(
    ("name", "words"),
    [("p.csv", ".txt or .jsonl"), ("no/such.txt", "cannot be read"), ("folder.txt", "is a directory")],
)
def test_what_is_no_prompt_file_is_refused(name, words, tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match=words):
        LineSource(str(tmp_path / name))


def test_a_table_holds_what_a_dictionary_holds_in_under_50_bytes_an_entry():
    random.seed(0)
    table, held = HashTable(), {}
    for number in range(100_000):
        text = repr(random.randrange(150_000))
        assert table.get(text) == held.get(text)
        assert table.set_default(text, number) == held.setdefault(text, number)
    assert len(table) == len(held)
    assert (sys.getsizeof(table._hashes) + sys.getsizeof(table._values)) / len(table) < 50


def test_what_is_kept_of_a_million_lines_is_under_150_bytes_a_line(tmp_path):
    """Ids of all lines, places of all results, and the finished results of half of them: arrays, counted here."""
    per_id, per_result = 48, sum(array.itemsize for array in _arrays(ResultFile(tmp_path / "out.jsonl")))
    per_finished = sum(array.itemsize for array in _arrays(FinishedRecords(tmp_path / "none", "")))
    assert per_id + per_result + per_finished / 2 < 100


def _arrays(holder):
    return [value for value in vars(holder).values() if hasattr(value, "itemsize")]
