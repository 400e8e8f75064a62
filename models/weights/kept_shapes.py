"""Shapes of a model's weights kept on disk: a later start builds no model to know them.

A file holds the path, shape, dtype and partition of each weight, and those of its metadata that say how it is stored.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...pallas_kernels.code_formats import CodeFormat
from ...pallas_kernels.kept_files import Kept, hash_of_sources, read_kept, write_kept
from ...pallas_kernels.layer_ops import LayerOps
from ..config.decoder import DecoderConfig
from .coded import StoredFormats
from .weight_state import KeptLeaf, KeptState, flat_state
from .weights import UnbuiltGraph, Weights

PACKAGES = "jax", "flax", "ml_dtypes", "numpy"
"""Packages that shapes depend on."""

PLAIN = (bool, int, float, str, type(None))
"""Types of metadata that are kept as they are."""
_SOURCES_HASH = hash_of_sources("jpaged.models", "jpaged.pallas_kernels")


class HasLayerOps(Protocol):
    """A backend, whose representation says what its layer operations depend on."""

    @property
    def layer_ops(self) -> LayerOps:
        """Return the layer operations."""


@lru_cache(maxsize=4)
def kept_shapes(
    directory: Path,
    config: DecoderConfig,
    dtype: str,
    mesh: Mesh,
    backend: HasLayerOps,
    formats: StoredFormats,
) -> Weights:
    """Return a model's abstract weights on one device, as `abstract_weights` does: those that an earlier start kept.

    Else they are made, and kept in `directory`. Where the shapes are kept the model is built later, if at all: once
    its structure is needed. `backend` tells apart layer operations that store weights in other ways.
    """

    def build() -> Weights:
        from .loading import abstract_weights

        return abstract_weights(config, dtype, mesh, backend.layer_ops, formats)

    versions = [version(package) for package in PACKAGES]
    parts = _SOURCES_HASH, sys.version, versions, type(config).__name__, config, dtype, formats, backend
    path = directory / f"shapes_{hashlib.sha256(repr(parts).encode()).hexdigest()}"
    if (kept := read_kept(path)) is not None:
        return _read(kept.header, config, mesh, build)
    weights = build()
    header = _header(weights)
    if header is not None and _is_whole(_read(header, config, mesh, build), weights):
        write_kept(path, Kept(header, b""))
    return weights


def _header(weights: Weights) -> dict[str, Any] | None:
    """Return what a file holds of the weights; None if they hold what no file can."""
    leaves = []
    for path, leaf in flat_state(weights.state):
        metadata = leaf.get_metadata()
        if "held" in metadata:
            return None
        kept = {name: value for name, value in metadata.items() if type(value) in PLAIN}
        parts = [[asdict(code_format), size] for code_format, size in metadata.get("code_parts", ())]
        leaves.append([path, leaf.shape, np.dtype(leaf.dtype).name, list(leaf.sharding.spec), kept, parts])
    return {
        "leaves": leaves,
        "stream_dtype": np.dtype(weights.stream_dtype).name,
        "logits_modules": weights.logits_modules,
    }


def _read(header: Mapping[str, Any], config: DecoderConfig, mesh: Mesh, build: Callable[[], Weights]) -> Weights:
    """Return the weights that a file's header describes."""
    leaves = {}
    for path, shape, dtype, spec, metadata, parts in header["leaves"]:
        if parts:
            code_parts = tuple((CodeFormat(**code_format), size) for code_format, size in parts)
            metadata = {**metadata, "code_parts": code_parts}
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        leaves[tuple(path)] = KeptLeaf(jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=sharding), metadata)
    return Weights(
        UnbuiltGraph(build),
        KeptState(leaves),
        np.dtype(header["stream_dtype"]),
        tuple(header["logits_modules"]),
        config,
    )


def _is_whole(read: Weights, weights: Weights) -> bool:
    """Return whether weights that were read are those that were kept."""
    names = "code_parts", "decoded_dtype", "becomes_floats"

    def described(one: Weights) -> list[Any]:
        return [
            (path, leaf.shape, leaf.dtype, leaf.sharding, *map(leaf.get_metadata().get, names))
            for path, leaf in flat_state(one.state)
        ]

    return described(read) == described(weights) and read.logits_modules == weights.logits_modules
