"""The scales of keys and values that checkpoints with 8-bit floats may have, one tensor each of a layer.

    model.layers.0.self_attn.k_scale   .v_scale            of compressed-tensors and vLLM; also .attn.k_scale
    model.layers.0.self_attn.k_proj.output_scale   v_proj.output_scale     of llm-compressor; also k_proj.k_scale
    model.layers.0.self_attn.kv_scale                      one for both

A scale times 448 is the largest number that was found, as in float8_e4m3fn; times 127, as in int8, where config.json
says that the numbers are integers. Another dtype of pages gets scales with the same range.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from ...pallas_kernels.ragged_paged_attention.kv_scales import KVScales, kv_scales, largest_number
from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..fields import Fields
from ..formats.checkpoint import Checkpoint, CheckpointView
from ..formats.files import CONFIG_FILE
from ..formats.float8 import SCALE_DTYPES
from ..formats.quantization import CONFIG_KEYS
from ..kv_ranges import WAY_OUT

_NAME = re.compile(
    r"\.(?P<layer>\d+)\.(?:self_attn|attn|attention|self_attention)\."
    r"(?:(?:attn\.)?(?P<tensor>k|v|kv)_scale|(?P<projection>k|v)_proj\.(?:output_scale|[kv]_scale))$"
)
LARGEST_NUMBERS = {"float": 448.0, "int": 127.0}
"""Type of the numbers that a config's `kv_cache_scheme` names → the largest of those that 8 bits hold."""
FLOATS = (*SCALE_DTYPES, "F64")
"""Dtypes of scales as headers of safetensors name them."""


def is_page_scale(name: str) -> bool:
    """Return whether a tensor's name is that of a scale of keys or of values."""
    return _NAME.search(name) is not None


class WithoutPageScales(CheckpointView):
    """The tensors of a checkpoint but the scales of keys and values, which are no weights."""

    def names(self) -> Collection[str]:
        """Return the names of all other tensors."""
        return [name for name in super().names() if not is_page_scale(name)]


def read_page_scales(
    checkpoint: Checkpoint, config: DecoderConfig, num_kv_heads: int, head_size: int, dtype: str
) -> KVScales | None:
    """Return the scales that a checkpoint's files have, as numpy arrays; None if they have none for any layer.

    `num_kv_heads` are those in pages, which may be copies of the model's, each beside the others of its head. A tensor
    holds one scale for all KV heads, or one for each. `dtype` is that of the pages. Raises ModelLoadError, which names
    the tensor, for values that are not floats, not finite or not positive, for another number of values, and if a layer
    with keys of its own lacks one of its two scales; and for numbers that `_largest_stored` refuses.
    """
    tensors = list(_tensors(checkpoint))
    if not tensors:
        return None
    layers, largest = config.spec.layers, _largest_stored(config.source, checkpoint.path)
    scales = np.ones((2, len(layers), num_kv_heads), np.float32)
    names: dict[tuple[int, int], str] = {}  # The tensor of keys (0) or of values (1) of a layer.
    for tensor in tensors:
        layer, places = _places_of(tensor, len(layers))
        by_head = _scales_by_head(tensor, layers[layer].num_kv_heads, num_kv_heads, largest)
        for place in places:
            scales[place, layer] = by_head
            names[place, layer] = tensor.name
    for layer, spec in enumerate(layers):
        owner = layer if spec.pages_of is None else spec.pages_of
        scales[:, layer] = scales[:, owner]
        for place, what in enumerate(("keys", "values")):
            if (place, owner) not in names:
                other = next(iter(names.values()))
                fault = f"it has the tensor {other}, and no scale of the {what} of layer {owner}"
                raise ModelLoadError(f"{checkpoint.path}: {fault}; complete it, or {WAY_OUT}")
    scales *= largest / largest_number(dtype)
    by_channel = len(layers), num_kv_heads, head_size
    unchanged = np.ones(by_channel, np.float32), np.zeros(by_channel, np.float32)
    return kv_scales(scales[0], scales[1], unchanged, unchanged)


class _ScaleTensor(NamedTuple):
    """A tensor of scales: its file, its name and its values."""

    path: Path
    name: str
    values: np.ndarray


def _places_of(tensor: _ScaleTensor, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Return the layer of a tensor, and whether its scales are of keys (0), of values (1) or of both.

    Raises ModelLoadError for a layer that the model has not.
    """
    match = _NAME.search(tensor.name)
    assert match is not None
    layer, kind = int(match["layer"]), match["tensor"] or match["projection"]
    if layer >= num_layers:
        fault = f"tensor {tensor.name} is of layer {layer}, the model has {num_layers}"
        raise ModelLoadError(f"{tensor.path}: {fault}; {WAY_OUT}")
    return layer, (0, 1) if kind == "kv" else ("kv".index(kind),)


def _scales_by_head(
    tensor: _ScaleTensor, heads_of_layer: int, num_kv_heads: int, largest: float
) -> Float32[np.ndarray, " K"]:
    """Return the scale of each of `num_kv_heads` heads in pages: that of its head, or the tensor's only one.

    Heads that are padding have the largest scale; theirs are never read. Raises ModelLoadError for values that are no
    scales, and for another number of values than 1, `heads_of_layer` and `num_kv_heads`.
    """
    name, values = tensor.name, tensor.values
    values = values.astype(np.float32).reshape(-1)
    if values.size not in (1, heads_of_layer, num_kv_heads):
        wanted = f"1, or {heads_of_layer}, one for each KV head"
        raise ModelLoadError(f"{tensor.path}: tensor {name} has {values.size} values, wanted {wanted}; {WAY_OUT}")
    with np.errstate(over="ignore", invalid="ignore"):
        is_scale = (values >= np.finfo(np.float32).tiny) & np.isfinite(values * np.float32(largest))
    if not is_scale.all():
        fault = f"tensor {name} has the value {values[~is_scale][0]}, wanted scales of pages, positive and such"
        raise ModelLoadError(f"{tensor.path}: {fault} that {largest:g} times them is finite; correct it, or {WAY_OUT}")
    copied = np.repeat(values, num_kv_heads // values.size)  # Copies of a head lie beside each other.
    return np.pad(copied, (0, num_kv_heads - copied.size), constant_values=np.max(values))


def _largest_stored(config: Mapping[str, Any], path: Path) -> float:
    """Return the number that a stored scale is multiplied by to give the largest key or value that was found.

    `config` is that of config.json in the directory `path`. Its `kv_cache_scheme` says what the numbers are, floats
    where it does not; modelopt names them by `kv_cache_quant_algo`. Raises ModelLoadError, which names the key, for
    anything but symmetric numbers of 8 bits: their scales would be read as others.
    """
    fields = Fields(config, path / CONFIG_FILE)
    quantization = next((fields.mapping(key) for key in CONFIG_KEYS if fields.has(key)), Fields({}, fields.path))
    scheme = quantization.mapping("kv_cache_scheme")
    rules: tuple[tuple[Fields, str, tuple[Any, ...]], ...] = (
        (scheme, "type", tuple(LARGEST_NUMBERS)),
        (scheme, "num_bits", (8,)),
        (scheme, "symmetric", (True,)),
        (quantization, "kv_cache_quant_algo", ("FP8",)),
    )
    for of_key, key, allowed in rules:
        if of_key.has(key) and of_key.data[key] not in allowed:
            raise of_key.wrong(key, f"{' or '.join(map(str, allowed))}, as scales of pages have; {WAY_OUT}")
    return LARGEST_NUMBERS[scheme.data.get("type") or "float"]


def _tensors(checkpoint: Checkpoint) -> Iterator[_ScaleTensor]:
    """Yield each tensor with scales of keys or values in the safetensors of a checkpoint.

    Raises ModelLoadError, which names the tensor, for one that is not stored as one of FLOATS.
    """
    import ml_dtypes  # noqa: F401  (safetensors needs the bfloat16 that it registers with numpy)
    from safetensors import safe_open

    for path in checkpoint.files():
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "np") as file:
            for name in filter(is_page_scale, file.keys()):
                if (dtype := file.get_slice(name).get_dtype()) not in FLOATS:
                    wanted = " or ".join(FLOATS)
                    raise ModelLoadError(f"{path}: tensor {name} is stored as {dtype}, wanted {wanted}; {WAY_OUT}")
                yield _ScaleTensor(path, name, np.asarray(file.get_tensor(name)))
