"""Reads and writes the folders of orbax: trees of arrays in zarr, with one file that lists the keys.

tensorstore, which orbax is built on, reads and writes the arrays: orbax's own interface restores and saves whole arrays
only, and a loader needs slices of them. Source of the layout: https://orbax.readthedocs.io/en/latest/guides/checkpoint/
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from ..errors import ModelLoadError
from ..fields import Fields, read_json_object
from .checkpoint import DTYPES, WHOLE, UnsavedTensor, as_matrix, block_of
from .files import STEP_FILE, TREE_FILE, UNFINISHED_ORBAX

ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")
STORE_ERRORS = (ValueError, OSError, IndexError, NotImplementedError)
"""What tensorstore raises for files that are missing or damaged."""
CHUNK_BYTES = 8 << 20
"""Bytes, before compression, of the rows that are written as one file."""
CACHE_BYTES, CACHE_OVERHEAD_BYTES = 64 << 20, 2 << 20
"""Size of the cache of decoded chunks while columns of a tensor are read, and the bytes that tensorstore's bookkeeping
takes of a cache. A chunk that does not fit is decoded again for every read."""


@dataclass(frozen=True)
class _Array:
    """The metadata of one array of the tree."""

    stored_name: str
    """Its name in the folder, which its name in the tree may shorten."""
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    """The shape of a chunk, which is stored, compressed and decoded as one."""

    def cache_bytes(self, *, by_columns: bool) -> int:
        """Return the bytes of cache with which each chunk is decoded only once while the array is read in order.

        For reads of whole rows, that is one band: all chunks that hold the same rows. A float32 matrix [4096, 1024] in
        chunks [512, 256] has bands of 512 rows, 2 MiB each. Reads by columns visit all bands again for each range of
        columns, so they need the whole matrix; they get CACHE_BYTES or one band, whichever is more, and decode chunks
        of a larger matrix several times. CACHE_OVERHEAD_BYTES are added for tensorstore's bookkeeping.
        """
        row_bytes = math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize
        band_bytes = row_bytes * (self.chunk[0] if self.chunk else 1)  # A scalar has no chunk shape and one value.
        return CACHE_OVERHEAD_BYTES + (max(CACHE_BYTES, band_bytes) if by_columns else band_bytes)


class OrbaxCheckpoint:
    """The leaves of an orbax folder. Keys of nested trees are joined by dots: {"model": {"norm": …}} is model.norm.

    The constructor reads the metadata of every array. A training state also holds leaves that no model reads, such as
    the name of a run: whatever is wrong with a leaf is an error only if the leaf is asked for. Since orbax may store a
    tensor as one compressed chunk, each thread keeps the decoded chunks of the tensor that it reads until it has read
    the tensor's last value. Each ModelLoadError names the folder.
    """

    def __init__(self, directory: Path):
        """Open the folder and read the shape, dtype and chunk shape of every array; no values are read.

        Raises ModelLoadError if the folder is unfinished, or its list of leaves is damaged or empty.
        """
        self.path = directory
        self._check_finished()
        fields = Fields(read_json_object(directory / TREE_FILE), directory / TREE_FILE)
        self._driver = "zarr3" if fields.boolean("use_zarr3", False) else "zarr"
        # All arrays are in one OCDBT database, whose root is the file manifest.ocdbt, or each has a folder of its own.
        # Without that file there is no database, whatever the key says. If the key is absent, the file alone decides:
        # hence the default True.
        self._is_ocdbt = fields.boolean("use_ocdbt", True) and (directory / "manifest.ocdbt").is_file()
        # Whether a chunk whose values are all zero is not stored, so that a missing chunk reads as zeros. That is so if
        # `store_array_data_equal_to_fill_value` is false or absent, as in older versions of orbax. If it is true, all
        # chunks are stored, and a missing one is an error.
        self._omits_zeros = not fields.boolean("store_array_data_equal_to_fill_value", False)
        # `_open_all` reads the attributes above, and adds to the faults: leaves → why they cannot be read.
        stored_names, self._faults = _stored_names(fields)
        self._arrays = self._open_all(stored_names)
        # Threads read different tensors at once: each has its own open array and its own cache of decoded chunks.
        self._thread = local()

    def names(self) -> Collection[str]:
        """Return the names of all leaves but empty containers, of those that are no arrays too."""
        return (self._arrays | self._faults).keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape; raise ModelLoadError for a leaf that is no array or cannot be read."""
        if name in self._faults:
            raise self._faults[name]
        return self._arrays[name].shape

    def dtype(self, name: str) -> str:
        """Return float32, bfloat16 or float16; raise ModelLoadError if the tensor is stored as anything else."""
        self.shape(name)  # Raises for a leaf that cannot be read.
        found = self._arrays[name].dtype
        if found not in DTYPES:
            allowed = f"{', '.join(DTYPES)} are available in this version: save it in one of these"
            raise ModelLoadError(f"{self.path}: tensor {name!r} is stored as {found}, {allowed}")
        return found

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis, and `columns` of the second of a matrix, in the stored dtype.

        Other axes are whole, and a scalar is returned whole. Read a tensor in order: chunks are cached for that, and
        another order may decode a chunk several times. Once the tensor's last value has been read, this thread drops
        the decoded chunks. An empty block is returned without opening a file. Raises ModelLoadError for an unsupported
        dtype and for a file that is missing or damaged.
        """
        self.dtype(name)  # Raises for an unsupported dtype.
        shape = self.shape(name)
        axes = block_of(shape, rows, columns)  # A scalar has none.
        if any(axis.start == axis.stop for axis in axes):
            block_shape = *(axis.stop - axis.start for axis in axes), *shape[len(axes) :]
            return as_matrix(np.empty(block_shape, self._arrays[name].dtype))
        try:
            by_columns = len(axes) > 1 and axes[-1].stop - axes[-1].start < shape[-1]
            values: np.ndarray = self._store(name, by_columns=by_columns)[axes].read().result()
        except STORE_ERRORS as error:
            raise self._fault(name, error) from error
        # The block holds the last value if it ends where the tensor ends, on each axis that is cut.
        if all(axis.stop == size for axis, size in zip(axes, shape, strict=False)):
            self._thread.store = self._thread.key = None
        return as_matrix(values)

    def files(self) -> list[Path]:
        """Return the files of metadata, and the folders that the arrays are in."""
        metadata = [self.path / TREE_FILE, self.path / STEP_FILE]
        if self._is_ocdbt:
            return [*metadata, self.path / "manifest.ocdbt", self.path / "d", *self.path.glob("ocdbt.process_*")]
        return [*metadata, *(self.path / array.stored_name for array in self._arrays.values())]

    def _check_finished(self) -> None:
        """Raise ModelLoadError for a folder that orbax has not finished writing.

        While orbax writes, the folder has another name, or the time of commit in its metadata is null. Older versions
        of orbax have no such metadata, or no such key: then the name decides.
        """
        path = self.path / STEP_FILE
        is_finished = UNFINISHED_ORBAX not in self.path.name
        if is_finished and path.is_file():
            is_finished = read_json_object(path).get("commit_timestamp_nsecs", 0) is not None
        if not is_finished:
            raise ModelLoadError(f"{self.path}: is an orbax checkpoint whose saving did not end; take another one")

    def _open_all(self, stored_names: Mapping[str, str]) -> dict[str, _Array]:
        """Return the metadata of each array, of which the names in the folder are given, by its name in the tree.

        The metadata of all arrays are read at the same time.

        An array counts among the faults if it cannot be opened, if its name would lead out of the folder, or if its
        chunks are larger than itself, which could take any amount of memory.
        """
        import ml_dtypes  # noqa: F401  (numpy knows bfloat16 from then on)
        import tensorstore

        context, opened = tensorstore.Context(), {}
        for name, stored in stored_names.items():
            if not self._is_ocdbt and ("/" in stored or "\\" in stored or stored in ("", ".", "..")):
                fault = f"{self.path / TREE_FILE}: {stored!r} is no name of an array: save the tree anew"
                self._faults[name] = ModelLoadError(fault)
            else:
                opened[name] = tensorstore.open(self._spec(stored), context=context, open=True, read=True)
        arrays = {}
        for name, future in opened.items():
            try:
                store = future.result()
            except STORE_ERRORS as error:
                self._faults[name] = self._fault(name, error)
                continue
            # tensorstore has no chunk shape for a scalar, and None for an axis whose chunk size it does not know.
            shape, chunk = tuple(store.shape), tuple(size or 0 for size in store.chunk_layout.read_chunk.shape or ())
            # A chunk has at least one element on each axis, also where the array has none: hence the `max`.
            if len(chunk) != len(shape) or any(part > max(1, size) for part, size in zip(chunk, shape, strict=True)):
                fault = f"of the shape {shape} is stored in pieces of the shape {chunk}, which are larger"
                self._faults[name] = ModelLoadError(f"{self.path}: tensor {name!r} {fault}; save it anew")
                continue
            arrays[name] = _Array(stored_names[name], shape, store.dtype.name, chunk)
        return arrays

    def _spec(self, stored_name: str) -> dict[str, Any]:
        """Return tensorstore's spec that opens the array of this name in the folder.

        The array is in the folder's OCDBT database, one key-value store for all arrays, or in a folder of its own name.
        A chunk that is not stored reads as zeros if the checkpoint omits zeros, and is an error otherwise.
        """
        base = {"driver": "file", "path": f"{self.path.resolve()}/"}
        if self._is_ocdbt:
            kvstore: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{stored_name}/"}
        else:
            kvstore = {**base, "path": f"{base['path']}{stored_name}/"}
        return {"driver": self._driver, "kvstore": kvstore, "fill_missing_data_reads": self._omits_zeros}

    def _store(self, name: str, *, by_columns: bool) -> Any:
        """Return the array `name`, opened by tensorstore for this thread, with a cache of decoded chunks of its own.

        A thread has one array open, which the next call for the same array returns again. The array is closed, and its
        cache freed, when the thread asks for another array, or for another `by_columns`, which says whether the thread
        reads columns of the array or whole rows.
        """
        import tensorstore

        if getattr(self._thread, "key", None) != (name, by_columns):
            self._thread.store = self._thread.key = None
            array = self._arrays[name]
            limit = array.cache_bytes(by_columns=by_columns)
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": limit}})
            # Files do not change while they are read, so what is cached is not compared with them again.
            options = {"recheck_cached_data": False, "recheck_cached_metadata": False}
            spec = {**self._spec(array.stored_name), **options}
            self._thread.store = tensorstore.open(spec, context=context, open=True, read=True).result()
            self._thread.key = name, by_columns
        return self._thread.store

    def _fault(self, name: str, error: Exception) -> ModelLoadError:
        reason = " ".join(str(error).split())[:200]
        return ModelLoadError(f"{self.path}: tensor {name!r} cannot be read ({reason}); take another copy")


def _stored_names(fields: Fields) -> tuple[dict[str, str], dict[str, ModelLoadError]]:
    """Return the names of all arrays, each with its name in the folder, and the faults of all other leaves by name.

    `fields` are those of the file that lists the leaves. Each entry of `tree_metadata` describes one: `key_metadata`
    are the keys on its path, and `value_metadata` has its type. The name in the folder is all keys joined by dots. A
    variable of nnx has its array under the key "value", which is no part of its name. Empty containers are skipped.
    Other leaves than arrays, such as strings, and two of the same name are faults. Raises ModelLoadError for a tree
    without leaves.
    """
    tree = fields.mapping("tree_metadata")
    stored_names: dict[str, str] = {}
    faults: dict[str, ModelLoadError] = {}
    for entry in tree.data:
        leaf = tree.mapping(entry)
        keys = [str(key.get("key")) for key in leaf.items("key_metadata", dict)]
        stored_name = ".".join(keys)
        name = stored_name.removesuffix(".value")
        kind = leaf.mapping("value_metadata").data.get("value_type")
        if kind in EMPTY_TYPES:
            continue
        if kind in ARRAY_TYPES and name not in stored_names:
            stored_names[name] = stored_name
            continue
        fault = "is there twice" if kind in ARRAY_TYPES else f"is a leaf of the type {kind!r}, wanted an array"
        message = f"{fields.path}: {name!r} {fault}: save a tree of arrays under Hugging Face names"
        faults[name] = ModelLoadError(message)
    if not stored_names and not faults:
        raise ModelLoadError(f"{fields.path}: holds no array: save a tree of arrays under Hugging Face names")
    return stored_names, faults


def write_orbax(directory: Path, tensors: Mapping[str, UnsavedTensor], *, is_nested: bool = False) -> None:
    """Write a tree of arrays in orbax's layout without OCDBT (one folder per array), one tensor at a time.

    A dotted name is one key of a flat tree or, with `is_nested`, the keys on the tensor's path. Each tensor is a folder
    of chunks of whole rows, about CHUNK_BYTES each before compression, so that a reader decodes little more than it
    needs. The file that lists the tree is written last, so a folder without it is not finished. Files may not be on the
    disk yet when this returns: the caller syncs them.
    """
    import tensorstore

    for name, tensor in tensors.items():
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        # At least one row, and no more than there are; the inner `max` is for rows without values. A scalar is a row.
        num_rows = min((*tensor.shape, 1)[0], max(1, CHUNK_BYTES // max(1, row_bytes)))
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{directory.resolve()}/{name}/"},
            "metadata": {
                "shape": tensor.shape,
                "chunks": [num_rows, *tensor.shape[1:]] if tensor.shape else [],
                "compressor": {"id": "zstd", "level": 1},
            },
            "dtype": tensor.dtype.name,
            "store_data_equal_to_fill_value": True,
            "context": {"file_io_sync": False},  # The caller syncs all files at once, which is faster.
        }
        store, values = tensorstore.open(spec, create=True).result(), tensor.make()
        for start in range(0, (*tensor.shape, 1)[0], num_rows):
            rows = slice(start, start + num_rows) if tensor.shape else ...
            store[rows].write(values[rows]).result()
        del values  # It frees the memory before the next tensor is made.
    leaves = {}
    for name in tensors:
        keys = name.split(".") if is_nested else [name]
        leaves[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # Type 2 is a key of a dict.
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    tree = {
        "tree_metadata": leaves, "use_ocdbt": False, "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
    }  # fmt: skip
    (directory / TREE_FILE).write_text(json.dumps(tree))
