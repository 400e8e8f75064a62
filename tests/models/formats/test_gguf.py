"""GGUF files are read as the `gguf` package reads them, and incomplete or corrupt files are refused."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.gguf import read_gguf
from jpaged.models.formats.gguf_types import STORED_TYPES

from ...gguf_file import write_gguf

U8, U32, STRING, ARRAY = 0, 4, 8, 9
F32, Q4_0 = 0, 2


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name="w", shape=(4,), kind=F32, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(pairs=(), tensors=(), *, version=3, num_tensors=None, num_values=None, data=bytes(16)):
    """Return a file made from the format's description alone, so that each part can be wrong by itself."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_values is None else num_values)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


CORRUPT = {
    "missing": None,
    "empty": b"",
    "HTML": b"<!DOCTYPE html><html></html>",
    "git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "magic only": b"GGUF",
    "version 1": gguf_bytes(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "more tensors than bytes": gguf_bytes(num_tensors=2**60),
    "more values than bytes": gguf_bytes(num_values=2**60),
    "string longer than the file": gguf_bytes([struct.pack("<Q", 2**62)]),
    "array longer than the file": gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", U32, 2**62))]),
    "string array longer than the file": gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**62))]),
    "array of arrays": gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "unknown value type": gguf_bytes([pair("a", 13, bytes(8))]),
    "alignment 0": gguf_bytes([pair("general.alignment", U32, struct.pack("<I", 0))]),
    "alignment is text": gguf_bytes([pair("general.alignment", STRING, text("32"))]),
    "no dimension": gguf_bytes(tensors=[tensor(shape=())]),
    "five dimensions": gguf_bytes(tensors=[tensor(shape=(1,) * 5)]),
    "unknown tensor type": gguf_bytes(tensors=[tensor(kind=4)]),
    "row that is not a multiple of the block": gguf_bytes(tensors=[tensor(shape=(33,), kind=Q4_0)], data=bytes(64)),
    "offset beyond the end": gguf_bytes(tensors=[tensor(offset=32)]),
    "offset of 2^63": gguf_bytes(tensors=[tensor(offset=2**63)]),
    "size beyond the end": gguf_bytes(tensors=[tensor(shape=(5,))]),
    "size that overflows 64 bits": gguf_bytes(tensors=[tensor(shape=(2**63, 2**63))]),
    "the same tensor twice": gguf_bytes(tensors=[tensor(), tensor()]),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_or_missing_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: ") as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    if "stored in type" in message or "needs a multiple" in message:
        assert message.endswith("fetch it again")


def small_file(path):
    metadata = {
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "a.bool": True,
        "a.strings": ["one", "Ġ two", "中文"],
        "a.numbers": [1, 2, 3],
        "a.big": (2**40, GGUFValueType.UINT64),
        "a.signed": (-3, GGUFValueType.INT8),
    }
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "v": np.arange(5, dtype=np.float16)}
    return write_gguf(path, metadata, tensors)


def test_metadata_is_read_as_it_was_written(tmp_path):
    metadata = read_gguf(small_file(tmp_path / "m.gguf")).metadata
    assert metadata == {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-5, rel=1e-7),
        "a.bool": True,
        "a.strings": ["one", "Ġ two", "中文"],
        "a.numbers": [1, 2, 3],
        "a.big": 2**40,
        "a.signed": -3,
    }


def test_a_string_that_is_not_utf8_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([pair("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]))
    assert read_gguf(path).metadata["a"].encode(errors="surrogateescape") == b"\xff\xfe"


STRINGS = {
    "short": [b"one", "\u4e2d\u6587".encode(), b"x" * 255],
    "empty": [b"", b"a", b""],
    "of 256 bytes": [b"a", b"x" * 256, b"b"],
    "of 65,536 bytes": [b"a", b"x" * 65536, b"b"],
    "with a zero byte": [b"a", b"b\0c", b"d"],
    "not UTF-8": [b"\xff", b"\xfe\xfd", b"a"],
    "none": [],
}


@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS.keys())
def test_a_list_of_strings_is_read_byte_by_byte(tmp_path, strings):
    items = b"".join(struct.pack("<Q", len(item)) + item for item in strings)
    pairs = [pair("a", ARRAY, struct.pack("<IQ", STRING, len(strings)) + items), pair("b", STRING, text("behind it"))]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(pairs))
    metadata = read_gguf(path).metadata
    assert [item.encode(errors="surrogateescape") for item in metadata["a"]] == strings
    assert metadata["b"] == "behind it"


def test_types_and_their_sizes_are_those_of_the_gguf_package():
    sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert sizes == {kind: STORED_TYPES[kind] for kind in sizes}


def test_every_truncation_is_refused(tmp_path):
    """The last tensor is padded to the alignment; without this padding the file is still complete."""
    whole = small_file(tmp_path / "m.gguf").read_bytes()
    end = max(t.offset + t.size_bytes for t in read_gguf(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            read_gguf(path)


def test_a_changed_byte_is_read_or_refused_but_never_crashes(tmp_path):
    whole = small_file(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "changed.gguf"
    random = np.random.default_rng(0)
    num_refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for index in random.integers(4, len(whole), size=random.integers(1, 4)):
            changed[index] = random.integers(256)
        path.write_bytes(changed)
        try:
            file = read_gguf(path)
        except ModelLoadError:
            num_refused += 1
        else:
            assert all(t.offset + t.size_bytes <= len(whole) for t in file.tensors.values())
    assert num_refused > 40


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]
KINDS += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_gguf_packages_dequantized_tensor(tmp_path, kind):
    """The rows are equal bit for bit: the same function de-quantizes them, and no block spans two rows."""
    num_rows, num_values = 6, 512
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    row_bytes = num_values // block_size * block_bytes
    # Any bytes are a valid tensor. Bytes below 0x3c give no scale that is NaN, which would compare as unequal.
    raw = np.random.default_rng(1).integers(0, 0x3C, (num_rows, row_bytes), dtype=np.uint8)
    tensors = {"first": np.ones(3, np.float32), "w": (raw, GGMLQuantizationType[kind])}
    file = read_gguf(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert file.tensors["w"].shape == (num_rows, num_values)
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    for rows in (slice(None), slice(2, 5), np.array([5, 0, 3])):
        values = file.read_rows("w", rows)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected[rows])
    assert file.read_rows("w", slice(0, 0)).shape == (0, num_values)


@pytest.mark.parametrize("rows", [slice(0, 0), slice(None)], ids=["no row", "all"])
def test_a_type_that_the_package_does_not_read_is_refused_before_rows_are_read(tmp_path, rows):
    tensor = np.zeros((2, 292), np.uint8), GGMLQuantizationType.Q8_K
    file = read_gguf(write_gguf(tmp_path / "m.gguf", tensors={"first": np.ones(3, np.float32), "w": tensor}))
    with pytest.raises(NotImplementedError, match="Q8_K"):
        file.read_rows("w", rows)


def write_split(folder, num_parts=3):
    """Write a tensor to each of several parts, with the package's own writer; return the parts' paths."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    writer.add_string("a.text", "of the first part")
    for index in range(num_parts):
        writer.add_tensor(f"w{index}", np.full((2, 3), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [folder / f"m-{part:05}-of-{num_parts:05}.gguf" for part in range(1, num_parts + 1)]


def test_all_parts_of_a_split_file_are_read_as_one(tmp_path):
    parts = write_split(tmp_path)
    file = read_gguf(parts[0])
    assert (file.paths, file.metadata["a.text"]) == (tuple(parts), "of the first part")
    for index in range(3):
        np.testing.assert_array_equal(file.read_rows(f"w{index}", slice(1, 2)), np.full((1, 3), index))


SPLIT_FAULTS = {
    "another part": (lambda parts: parts[::-1], r"is one of 3 parts of a file: give the first one, .*-00001-of-00003"),
    "another name": (lambda parts: [parts[0].rename(parts[0].with_name("a.gguf"))], "gguf-split --merge"),
    "a part missing": (lambda parts: parts[1].unlink(), r"m-00002-of-00003\.gguf: cannot be read as GGUF"),
    "a tensor twice": (lambda parts: parts[1].write_bytes(parts[0].read_bytes()), "tensor 'w0' is in another part too"),
    "a tensor missing": (
        lambda parts: write_gguf(parts[1], {"split.no": (1, GGUFValueType.UINT16)}),
        "its 3 parts hold 2 tensors, wanted 3",
    ),
}


@pytest.mark.parametrize(("damage", "message"), SPLIT_FAULTS.values(), ids=SPLIT_FAULTS.keys())
def test_parts_that_do_not_make_up_a_file_are_refused_in_one_line(tmp_path, damage, message):
    parts = write_split(tmp_path)
    changed = damage(parts)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf(changed[0] if isinstance(changed, list) else parts[0])
    assert "\n" not in str(caught.value)
