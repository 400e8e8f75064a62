"""Files that are read are compared with a directory's list of SHA-256 sums, and files that are not do not count."""

import re
from pathlib import PurePath

import pytest

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.files import check_manifest, write_manifest

READ = [PurePath(name) for name in ("config.json", "tokenizer.json", "model.safetensors", "tree/a")]


@pytest.fixture
def directory(tmp_path):
    for name in ("config.json", "model.safetensors", "tree/a/0.0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    (tmp_path / "results.json").write_text("is not read")
    return tmp_path


def listed(change):
    """Return a function that changes the lines of a directory's list."""

    def apply(directory):
        path = directory / "SHA256SUMS"
        path.write_text(change(path.read_text()))

    return apply


def test_files_that_match_are_taken_and_so_is_a_directory_without_a_list(directory):
    assert check_manifest(directory, READ) == []
    listed(lambda text: re.sub(r"  (\S+)", r" *./\1", text.upper().replace("CONFIG.JSON", "config.json")))(directory)
    assert check_manifest(directory, READ[:1]) == []
    (directory / "SHA256SUMS").unlink()
    (directory / "config.json").write_text("changed")
    assert check_manifest(directory, READ) == []


def test_what_is_read_and_not_listed_is_returned(directory):
    (directory / "tokenizer.json").write_text("x")
    (directory / "tree" / "a" / "0.1").write_text("x")
    assert check_manifest(directory, READ) == ["tokenizer.json", "tree/a/0.1"]
    assert check_manifest(directory, READ[:1]) == []


FAULTS = {
    "changed": (
        lambda directory: (directory / "tree/a/0.0").write_text("x"),
        r"tree/a/0\.0: its SHA-256 sum begins with [0-9a-f]{12}, SHA256SUMS lists [0-9a-f]{12}; the file was damaged",
    ),
    "missing": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "SHA256SUMS: lists model.safetensors, which is not in the directory: fetch it",
    ),
    "missing in a folder": (
        lambda directory: (directory / "tree/a/0.0").unlink(),
        r"SHA256SUMS: lists tree/a/0\.0, which is not in the directory: fetch it",
    ),
    "not a sum": (listed(lambda text: "abc  config.json\n"), "line 1 is 'abc  config.json', wanted a SHA-256 sum"),
    "the directory": (listed(lambda text: f"{'0' * 64}  ./.\n"), "line 1 is '0+', wanted a SHA-256 sum"),
    "outside": (listed(lambda text: f"{'0' * 64}  ../config.json\n"), r"line 1 is '0+\.*'?"),
    "not text": (lambda directory: (directory / "SHA256SUMS").write_bytes(b"\xff"), "SHA256SUMS: cannot be read"),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_differs_from_the_list_is_refused_in_one_line(directory, damage, message):
    damage(directory)
    with pytest.raises(ModelLoadError, match=message) as caught:
        check_manifest(directory, READ)
    assert "\n" not in str(caught.value)
