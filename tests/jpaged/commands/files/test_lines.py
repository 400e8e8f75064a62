"""Lines of files and pipes, and the memory that a long file takes."""

import json
import os
import random
import time
import tracemalloc

import pytest

from jpaged.commands.files.lines import READ_BYTES, IdTable, LineSource, line_digest
from jpaged.commands.files.results import ResultFile
from jpaged.commands.files.resume import FinishedRecords, RecordSpan, resume_key
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
    source.wait_for(lambda: 0.0)
    lines = iter(source)
    assert next(lines) is None
    os.write(writer, b"one\ntw")
    assert next(lines) == (1, b"one")
    assert [next(lines), next(lines)] == [None, None]
    os.write(writer, b"o\n\nthree")
    assert next(lines) == (2, b"two")
    source.wait_for(lambda: 0.05)
    start = time.monotonic()
    assert next(lines) is None
    assert time.monotonic() - start > 0.04
    os.close(writer)
    source.wait_for(lambda: None)
    assert list(lines) == [(4, b"three")]


@pytest.mark.parametrize(
    ("name", "words"),
    [("p.csv", ".txt or .jsonl"), ("no/such.txt", "cannot be read"), ("folder.txt", "is a directory")],
)
def test_what_is_no_prompt_file_is_refused(name, words, tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match=words):
        LineSource(str(tmp_path / name))


def test_a_table_holds_what_a_dictionary_holds():
    random.seed(0)
    table, held = IdTable(), {}
    for number in range(50_000):
        id_ = random.choice((int, str))(random.randrange(40_000))
        assert table.get(id_) == held.get(id_)
        assert table.set_default(id_, number) == held.setdefault(id_, number)
    assert len(table) == len(held)


@pytest.mark.slow
def test_what_is_kept_of_a_line_is_under_150_bytes(tmp_path):
    """A resumed run, of whose lines half are done: everything that grows with them, where tables have just grown."""
    num_lines, path = 90_000, tmp_path / "out.jsonl"
    with path.open("w") as file:
        for number in range(0, num_lines, 2):
            key = resume_key("0" * 16, line_digest(b"%d" % number))
            record = {"id": f"line-{number}", "outputs": [{}], "metrics": {"resume_key": key}}
            file.write(json.dumps(record) + "\n")
    tracemalloc.start()
    finished, results, ids = FinishedRecords(path, "0" * 16), ResultFile(path), IdTable()
    for number in range(num_lines):
        id_ = f"line-{number}"
        entry = finished.take(id_, line_digest(b"%d" % number), number + 1)
        assert (entry is None) == number % 2
        if entry is None:
            ids.set_default(id_, number + 1)
        results.keep(number + 1, RecordSpan(0, 1) if entry is None else finished.span(entry))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / num_lines < 150
