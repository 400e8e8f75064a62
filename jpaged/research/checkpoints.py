"""Checkpoints as a trainer has them: a served model as a differentiable module, and modules as directories again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..checks import Unfit, check, one_line, or_none, refusal, shown, text
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..models.formats.checkpoint import DTYPES, UnsavedTensor
from ..models.formats.files import GENERATION_FILE
from ..models.formats.orbax_checkpoint import write_orbax
from ..models.formats.safetensors_writing import write_safetensors
from ..models.served import split_module
from ..models.weights.checkpoint_module import CheckpointModule, load_checkpoint_module
from ..models.weights.saving import check_expressible, new_directory, write_model
from ..sharding import LOGICAL_TO_MESH, select_devices
from ..startup.open_model import open_model
from ..startup.sizing.sizes import requested_max_len
from ..text.tokenizing.tokenizer import MORE_FILES, TOKENIZER_FILES, VOCABULARY_FILES

COPIED_FILES = sorted({GENERATION_FILE, *TOKENIZER_FILES, *VOCABULARY_FILES, *MORE_FILES})
"""Files of a model's directory, and a folder of files, that a saved one takes over as they are."""


def load_module(
    model: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Any = "float32",
    compute_dtype: Any = None,
    max_model_len: int | None = None,
    revision: str | None = None,
    load_format: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointModule:
    """Return a model as an nnx module whose dense forward can be differentiated: `module(ids [B, N])` → [B, N, V].

    `model`, `revision`, `load_format`, `hf_overrides` and `max_model_len` are what an Engine takes; random weights
    (`load_format` dummy) are not available. Parameters are of `dtype`, and computed with in `compute_dtype`, by default
    the same: float32, bfloat16 or float16. They lie on JAX's default device, or are spread over a `mesh` that has an
    axis `tensor`, by the logical axes of the family's weights; a size that this axis does not divide is whole on every
    device. `progress(done, total)` is told of each tensor. Raise ModelLoadError for a model that cannot be loaded, and
    ConfigError for an option.
    """
    param_dtype = check("dtype", dtype, _float_dtype, error=ConfigError)
    compute = check("compute_dtype", compute_dtype, or_none(_float_dtype), error=ConfigError) or param_dtype
    check("mesh", mesh, or_none(_mesh), error=ConfigError)
    if mesh is None:
        try:
            select_devices("auto")
        except RuntimeError as error:  # The machine has an accelerator, and this JAX only a CPU.
            raise ConfigError(one_line(error)) from error
    options: dict[str, Any] = {"model": model, "revision": revision, "load_format": load_format}
    options |= {"hf_overrides": hf_overrides or {}, "max_model_len": max_model_len}
    config = EngineConfig(**options, skip_tokenizer_init=True, generation_config="none")
    if load_format == "dummy":
        raise refusal("load_format", "dummy", "a format of files", "save random weights first", error=ConfigError)
    handle = open_model(config)
    assert handle.source is not None
    assert handle.checkpoint is not None
    handle.check_weight_files()
    return load_checkpoint_module(
        config.model,
        handle.decoder.for_context(requested_max_len(config, handle.spec)),
        handle.checkpoint,
        dtype=param_dtype,
        compute_dtype=compute,
        directory=None if handle.source.kind == "gguf" else str(handle.source.directory.resolve()),
        mesh=mesh,
        progress=progress,
    )


def save_checkpoint(module: nnx.Module, directory: str | Path, *, dtype: Any = None, overwrite: bool = False) -> None:
    """Write a module's weights to `directory`, which appears whole or not at all.

    A module of `load_module` becomes a directory that Hugging Face's transformers and jpaged open: safetensors, in
    shards of 5 GB, config.json, and the tokenizer and generation_config.json of the directory that it came from; a GGUF
    file has no such files. Any other module is written as a tree of orbax under the paths of its state: the parameters
    and the other arrays of floats, such as running statistics, without random streams and caches.

    `dtype` is float32, bfloat16 or float16; None keeps that of each array. `directory` must be new or empty, unless
    `overwrite` is true: then a checkpoint that is there is replaced, with everything else in its directory. Raise
    ConfigError for another module or dtype, and ValueError for a directory that cannot be written to.
    """
    if not isinstance(module, nnx.Module):
        raise refusal("module", type(module).__name__, "a module of load_module, or one of your own", error=ConfigError)
    chosen = check("dtype", dtype, or_none(_float_dtype), error=ConfigError)
    path = Path(check("directory", directory, text("the path of a directory"), error=ConfigError)).expanduser()
    if not isinstance(module, CheckpointModule):
        tensors = _unsaved(_weights_of(module), chosen)
        with new_directory(path, overwrite=overwrite) as unfinished:
            write_orbax(unfinished, tensors, is_nested=True)
        return
    config = module.origin.full_config
    check_expressible(config)
    tensors = _unsaved(module.hf_state(), chosen)
    with new_directory(path, overwrite=overwrite) as unfinished:
        if module.origin.directory is not None:
            _copy_files(Path(module.origin.directory), unfinished)
        write_model(unfinished, config, tensors, write_safetensors)


def _float_dtype(value: Any) -> str:
    """Take float32, bfloat16 or float16 in any form that numpy knows, and return its name; raise Unfit otherwise."""
    try:
        name = jnp.dtype(value).name
    except (TypeError, ValueError):
        name = ""
    if value is None or name not in DTYPES:  # None is numpy's float64.
        raise Unfit(", ".join(DTYPES))
    return name


def _mesh(value: Any) -> Mesh:
    """Take a mesh that has all axes that weights may be spread over; raise Unfit otherwise."""
    axes = dict.fromkeys(axis for axis in LOGICAL_TO_MESH.values() if axis is not None)
    if not isinstance(value, Mesh) or not axes.keys() <= set(value.axis_names):
        got = f"the axes {', '.join(map(str, value.axis_names))}" if isinstance(value, Mesh) else shown(value)
        raise Unfit(f"a jax.sharding.Mesh with the axis {', '.join(axes)}", got=got)
    return value


def _weights_of(module: nnx.Module) -> dict[str, Any]:
    """Return the weights of a caller's own module by the dotted paths of its state, as an engine would serve them."""
    _, state = split_module(module, "__call__", "logits")
    found = {}
    for path, leaf in nnx.to_flat_state(state):
        found[".".join(map(str, path))] = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    if not found:
        raise refusal("module", f"{type(module).__name__} without parameters", "one that has some", error=ConfigError)
    return found


def _unsaved(arrays: Mapping[str, Any], dtype: str | None) -> dict[str, UnsavedTensor]:
    """Return arrays as tensors to write, of `dtype` or of their own; each is copied to the host when it is written."""
    tensors = {}
    for name, array in arrays.items():
        is_array = isinstance(array, np.ndarray | jax.Array)
        is_float = is_array and jnp.issubdtype(array.dtype, jnp.floating)
        if not is_float or (dtype is None and array.dtype.name not in DTYPES):
            got = f"{array.dtype if is_array else type(array).__name__} in {name}"
            way_out = "give the dtype to save it in" if is_float else "cast it, or give it values"
            raise refusal("module", got, f"arrays of {', '.join(DTYPES)}", way_out, error=ConfigError)
        stored = jnp.dtype(dtype or array.dtype)
        tensors[name] = UnsavedTensor(tuple(array.shape), stored, partial(_on_host, array, stored))
    return tensors


def _on_host(array: np.ndarray | jax.Array, dtype: Any) -> np.ndarray:
    return np.asarray(array).astype(dtype, copy=False)


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer and the generation config that are there."""
    for name in COPIED_FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, target / name)
