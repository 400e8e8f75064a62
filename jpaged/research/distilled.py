"""A directory of distilled sequences: shards of a teacher's most likely tokens, and an index of those that are whole.

A shard is a file of safetensors with S sequences of T tokens in all, one behind the other. Sequence i has the tokens
from `offsets[i]` to `offsets[i + 1]`. Its first token is not predicted, so that its places are those from
`offsets[i] − i` to `offsets[i + 1] − i − 1`, one for each of its other tokens:

    offsets        int64 [S + 1]
    token_ids      int32 [T]
    top_token_ids  int32 [T − S, K], the most likely one first
    top_logprobs   float32, float16 or bfloat16 [T − S, K]
    log_rest       likewise [T − S], the logarithm of the probability of all other tokens

The metadata `ids` of the file are the ids of its sequences as a list in JSON. A shard counts once index.json lists it.
This module reads such a directory with numpy alone; `distillation.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
from jaxtyping import Bool, Float, Int

from ..checks import INT64, check, integer, one_line, or_none, refusal, text
from ..errors import InvalidRequestError

INDEX_FILE = "index.json"
FORMAT = 1
"""Number of the directory's format, which its index names."""
MAX_OPEN = 1024
"""Shards that stay open while sequences are read in a random order; opening one takes as long as 10 sequences."""


class Settings(msgspec.Struct, frozen=True):
    """What the results in a directory depend on; a directory has results of the same settings alone."""

    model: str
    """Its `ModelSource.identity`, or the name of the class of a caller's own module."""
    weights: str
    """Where they are from: "files", "given" as `params` or in a module, or "random"."""
    weights_version: int
    hf_overrides: dict[str, Any]
    dtype: str | None
    """The dtypes that the teacher's engine computed in, and held keys and values in."""
    kv_cache_dtype: str | None
    vocab_size: int
    top_k: int
    temperature: float
    logprobs_dtype: str
    quantization: str | None = None
    """The option, if floats were quantized as they were read."""


class ShardEntry(msgspec.Struct, frozen=True):
    """What the index says of a shard."""

    file: str
    num_sequences: int
    num_tokens: int
    max_len: int
    """Tokens of its longest sequence."""


class Index(msgspec.Struct, frozen=True):
    """The content of index.json."""

    settings: Settings
    shards: tuple[ShardEntry, ...] = ()
    format: int = FORMAT


class DistilledSequence(NamedTuple):
    """One sequence of N tokens, and the K tokens that the teacher holds most likely at each place behind the first."""

    id: str | int
    token_ids: Int[np.ndarray, " N"]
    """int32."""
    top_token_ids: Int[np.ndarray, "N1 K"]
    """int32; the most likely one first."""
    top_logprobs: Float[np.ndarray, "N1 K"]
    """float32."""
    log_rest: Float[np.ndarray, " N1"]
    """float32; the logarithm of the probability of all other tokens, −inf if there is none."""


class DistilledBatch(NamedTuple):
    """B sequences as arrays of numpy, padded by zeros at their ends to N tokens, those of the directory's longest one.

    All batches of a directory have the same shape: a last one of fewer sequences has rows without a place.
    """

    token_ids: Int[np.ndarray, "B N"]
    mask: Bool[np.ndarray, "B N1"]
    """Whether there is a place."""
    top_token_ids: Int[np.ndarray, "B N1 K"]
    top_logprobs: Float[np.ndarray, "B N1 K"]
    log_rest: Float[np.ndarray, "B N1"]


@overload
def read_distilled(
    directory: str | Path, *, batch_size: None = None, seed: int | None = None
) -> Iterator[DistilledSequence]:
    """Return sequences; the last definition has the contract and the code."""


@overload
def read_distilled(directory: str | Path, *, batch_size: int, seed: int | None = None) -> Iterator[DistilledBatch]:
    """Return padded batches."""


def read_distilled(
    directory: str | Path, *, batch_size: int | None = None, seed: int | None = None
) -> Iterator[DistilledSequence] | Iterator[DistilledBatch]:
    """Return an iterator over what `distill` has written to a directory, once: sequences, or batches of `batch_size`.

    Sequences come in the order in which they were written, or with a `seed` in a random order that it decides, over all
    shards. Files are memory-mapped, and values are read when their sequence or batch is asked for. A directory may be
    read while `distill` adds to it: the shards are those that it has now.

    Raise InvalidRequestError for a wrong argument, for a directory without an index, and for a shard that is damaged.
    """
    path = Path(check("directory", directory, text("the path of a directory"))).expanduser()
    size = check("batch_size", batch_size, or_none(integer(1)))
    order_seed = check("seed", seed, or_none(integer(0, INT64[1])))
    index = read_index(path)
    if index is None:
        got = f"{path}, which has no {INDEX_FILE}"
        raise refusal("directory", got, "one that distill or jpaged distill has written")
    rows = _rows(path, index, order_seed)
    if size is None:
        return (DistilledSequence(shard.ids[row], *shard.arrays(row)) for shard, row in rows)
    max_len = max((entry.max_len for entry in index.shards), default=1)
    return _batches(rows, size, max_len, index.settings.top_k)


def _rows(directory: Path, index: Index, seed: int | None) -> Iterator[tuple[ShardReader, int]]:
    """Yield the shard and the row of each sequence, shard by shard, or in the random order of a seed."""
    opened = lru_cache(MAX_OPEN)(partial(ShardReader, directory))
    sizes = np.array([entry.num_sequences for entry in index.shards], int)
    shard_of, row_of = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(0), *map(np.arange, sizes)])
    order = np.arange(len(row_of)) if seed is None else np.random.default_rng(seed).permutation(len(row_of))
    for place in order:
        yield opened(index.shards[shard_of[place]]), int(row_of[place])


def _batches(
    rows: Iterator[tuple[ShardReader, int]], batch_size: int, max_len: int, num_tops: int
) -> Iterator[DistilledBatch]:
    """Yield the sequences of these rows of shards in batches, padded to `max_len` tokens."""
    shape = batch_size, max_len - 1
    while batch_rows := list(islice(rows, batch_size)):
        batch = DistilledBatch(
            token_ids=np.zeros((batch_size, max_len), np.int32),
            mask=np.zeros(shape, bool),
            top_token_ids=np.zeros((*shape, num_tops), np.int32),
            top_logprobs=np.zeros((*shape, num_tops), np.float32),
            log_rest=np.zeros(shape, np.float32),
        )
        for batch_row, (shard, row) in enumerate(batch_rows):
            arrays = shard.arrays(row)
            batch.mask[batch_row, : len(arrays[0]) - 1] = True
            for target, values in zip((batch[0], *batch[2:]), arrays, strict=True):
                target[batch_row, : len(values)] = values
        yield batch


def read_index(directory: Path) -> Index | None:
    """Return the index of a directory; None if it has none, or is not there.

    Raise InvalidRequestError if it cannot be read, is no such index, or is one of another format.
    """
    path = directory / INDEX_FILE
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise refusal("directory", f"{path}, which is no index ({one_line(error)})", "one of distill") from error
    names = [entry.file for entry in index.shards]
    if index.format != FORMAT or any(Path(name).name != name for name in names):
        got = f"{path}, of format {index.format}" if index.format != FORMAT else f"{path}, with files elsewhere"
        raise refusal("directory", got, f"format {FORMAT}, with files beside it")
    return index


class ShardReader:
    """An open shard, whose values are read from the mapped file when they are asked for."""

    def __init__(self, directory: Path, entry: ShardEntry):
        """Open a file. Raise InvalidRequestError if it is damaged, or not the one that the index has an entry for."""
        import ml_dtypes  # noqa: F401  safetensors needs the bfloat16 that it registers with numpy.
        from safetensors import SafetensorError, safe_open

        path, fault = directory / entry.file, ""
        try:
            self._file: Any = safe_open(path, "numpy")
            self._ids: str = self._file.metadata()["ids"]
            self.offsets: np.ndarray = self._file.get_tensor("offsets")
            sizes = len(self.offsets) - 1, self.offsets[-1], np.diff(self.offsets).max(initial=0)
            if sizes != (entry.num_sequences, entry.num_tokens, entry.max_len):
                fault = "its sizes are not those of the index"
        except (SafetensorError, OSError, TypeError, KeyError) as error:  # TypeError: a file without metadata.
            fault = one_line(error)
        if fault:
            way_out = "fetch it again, or distill into another directory"
            raise InvalidRequestError(f"directory: {path} is no whole shard ({fault}); {way_out}", param="directory")

    @cached_property
    def ids(self) -> list[str | int]:
        """Return the ids of all sequences."""
        return json.loads(self._ids)

    def token_ids(self) -> list[np.ndarray]:
        """Return the token ids of each sequence."""
        return np.split(self._file.get_tensor("token_ids"), self.offsets[1:-1])

    def arrays(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what a `DistilledSequence` has beside its id, for the sequence of a row, copied from the file."""
        start, end = self.offsets[row : row + 2].tolist()
        places = slice(start - row, end - row - 1)
        token_ids = self._file.get_slice("token_ids")[start:end]
        top_token_ids, top_logprobs, log_rest = (
            self._values(name, places) for name in ("top_token_ids", "top_logprobs", "log_rest")
        )
        return (
            token_ids,
            top_token_ids,
            top_logprobs.astype(np.float32, copy=False),
            log_rest.astype(np.float32, copy=False),
        )

    def _values(self, name: str, places: slice) -> np.ndarray:
        """Return the rows of a tensor at these places; the file cannot slice a tensor at its end, for none."""
        stored = self._file.get_slice(name)
        if places.start == places.stop:
            return np.zeros((0, *stored.get_shape()[1:]), np.int32)
        return stored[places]
