"""A directory's list of SHA-256 sums is compared with every file that is read."""

import re

import pytest

from jpaged.models.errors import ModelLoadError
from jpaged.models.io.files import check_manifest, write_manifest


@pytest.fixture
def directory(tmp_path):
    for name in ("config.json", "model.safetensors", "tree/a/0.0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    (tmp_path / "README.md").write_text("is not read")
    return tmp_path


def is_read(name):
    return not name.endswith(".md") and name != "SHA256SUMS"


def listed(change):
    """Return a function that changes the lines of a directory's list."""

    def apply(directory):
        path = directory / "SHA256SUMS"
        path.write_text(change(path.read_text()))

    return apply


def test_files_that_match_are_taken_and_so_is_a_directory_without_a_list(directory):
    check_manifest(directory, is_read)
    listed(lambda text: re.sub(r"  (\S+)", r" *./\1", text.upper().replace("CONFIG.JSON", "config.json")))(directory)
    check_manifest(directory, lambda name: name == "config.json")
    (directory / "SHA256SUMS").unlink()
    (directory / "config.json").write_text("changed")
    check_manifest(directory, is_read)


FAULTS = {
    "changed": (
        lambda directory: (directory / "tree/a/0.0").write_text("x"),
        r"tree/a/0\.0: its SHA-256 sum begins with [0-9a-f]{12}, SHA256SUMS lists [0-9a-f]{12}; the file was damaged",
    ),
    "missing": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "SHA256SUMS: lists model.safetensors, which is not in the directory: fetch it",
    ),
    "not listed": (
        lambda directory: (directory / "tokenizer.json").write_text("x"), "does not list tokenizer.json, which",
    ),
    "not a sum": (listed(lambda text: "abc  config.json\n"), "line 1 is 'abc  config.json', wanted a SHA-256 sum"),
    "outside": (listed(lambda text: f"{'0' * 64}  ../config.json\n"), r"line 1 is '0+\.*'?"),
    "not text": (lambda directory: (directory / "SHA256SUMS").write_bytes(b"\xff"), "SHA256SUMS: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_differs_from_the_list_is_refused_in_one_line(directory, damage, message):
    damage(directory)
    with pytest.raises(ModelLoadError, match=message) as caught:
        check_manifest(directory, is_read)
    assert "\n" not in str(caught.value)
