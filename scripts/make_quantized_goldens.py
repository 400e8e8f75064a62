"""Makes tests/golden/quantized: small matrices that quantization libraries packed, and the same libraries' floats.

Each folder is one case. config.json holds `quantization_config` alone, as the library or transformers writes it;
model.safetensors holds the packed tensors of `model.layers.0.mlp.down_proj`; dequantized.safetensors holds the float32
matrix [outputs, inputs] that the library's own code makes of these tensors. Libraries multiply codes by scales in the
dtype of the scales, so they are given the stored scales in float32, and the product has no rounding to 16 bits.

Run this once, in an environment of its own: the libraries are old, and none is a dependency of jpaged. CPython 3.11 on
x86-64 without a GPU is enough. `--no-deps` leaves out packages that the libraries need only for whole models:

    python3.11 -m venv gold
    gold/bin/pip install torch==2.13.0 numpy==2.2.6 transformers==4.53.3 peft==0.12.0 accelerate==1.12.0 \\
        datasets==3.6.0 huggingface_hub==0.36.2 compressed-tensors==0.18.0 safetensors==0.8.0 setuptools wheel \\
        gekko threadpoolctl protobuf pillow
    gold/bin/pip install --no-deps autoawq==0.2.9 auto-gptq==0.7.1 device-smi==0.4.1 tokenicer==0.0.4 logbar==0.0.4 \\
        random_word==1.0.13
    BUILD_CUDA_EXT=0 gold/bin/pip install --no-deps --no-build-isolation gptqmodel==2.2.0
    gold/bin/python scripts/make_quantized_goldens.py

AutoGPTQ knows only zero points that are stored minus one, so the cases of `gptq_v2` and of the borrow come from its
successor GPTQModel. compressed-tensors 0.18.0 is the last release with activation order by groups; 0.20.1 packs all
other cases into the same tensors, and leaves most fields with default values out of config.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compressed_tensors
import gptqmodel
import torch
from auto_gptq.modeling._base import BaseQuantizeConfig
from auto_gptq.quantization.quantizer import Quantizer as AutoGPTQQuantizer
from auto_gptq.utils.import_utils import dynamically_import_QuantLinear
from awq.models._config import AwqConfig
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel.nn_modules.qlinear.torch import TorchQuantLinear
from gptqmodel.quantization import FORMAT
from gptqmodel.quantization import config as gptqmodel_config
from gptqmodel.quantization.quantizer import Quantizer as GPTQModelQuantizer
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPTQConfig

LAYER = "model.layers.0.mlp.down_proj"
STANDARD_DEVIATION = 0.05
MAX_ERRORS = {"int4": 0.15, "int8": 0.01, "float4": 0.15, "float8": 0.04}
"""Type of the codes → largest root mean square error of the floats, relative to the matrix."""


@dataclass(frozen=True)
class Packed:
    """A matrix as a library packs it, and the float32 matrix [outputs, inputs] that the library makes of that."""

    quantization_config: dict[str, Any]
    tensors: dict[str, Tensor]
    dequantized: Tensor
    original: Tensor
    code_type: str = "int4"
    """A key of MAX_ERRORS."""


def pack_awq(weight_DF: Tensor, *, group_size: int) -> Packed:
    """Pack with AutoAWQ, 4 bits with zero points: eight outputs per word, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    config = AwqConfig(q_group_size=group_size, version="gemm")
    linear = linear_of(weight_DF.half())
    settings = SimpleNamespace(group_size=group_size, w_bit=config.w_bit, zero_point=config.zero_point)
    linear.weight.data, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(settings, linear.weight.data)
    layer = WQLinear_GEMM.from_linear(
        linear, config.w_bit, group_size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    dequantized_FD = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), config.w_bit, group_size)
    return Packed(config.to_transformers_dict(), layer.state_dict(), dequantized_FD.t(), weight_DF)


def pack_auto_gptq(
    weight_DF: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = False,
    has_activation_order: bool = False,
    is_from_transformers: bool = False,
) -> Packed:
    """Pack with AutoGPTQ: words hold consecutive inputs of one output, and zero points are stored minus one.

    With activation order, inputs belong to groups by a random permutation. The config is the one that transformers
    writes, with its `checkpoint_format`, or AutoGPTQ's own, which has no such key.
    """
    num_outputs, num_inputs = weight_DF.shape
    inputs_per_group = num_inputs if group_size == -1 else group_size
    group_of_input = torch.arange(num_inputs, dtype=torch.int32) // inputs_per_group
    if has_activation_order:
        group_of_input = group_of_input[torch.randperm(num_inputs)]
    quantizer = AutoGPTQQuantizer()
    quantizer.configure(bits, perchannel=True, sym=is_symmetric)
    rounded_DF, scales, zeros = quantize_groups(quantizer, weight_DF, group_of_input)
    layer_class = dynamically_import_QuantLinear(
        use_triton=False,
        desc_act=has_activation_order,
        group_size=group_size,
        bits=bits,
        disable_exllama=True,
        disable_exllamav2=True,
    )
    layer = layer_class(bits, group_size, num_inputs, num_outputs, bias=False)
    layer.pack(linear_of(rounded_DF.half()), scales, zeros, group_of_input)
    tensors = dict(layer.state_dict())
    # The library de-quantizes only inside its product. Of an identity matrix in float32, with scales in float32, the
    # product is the matrix itself.
    layer.scales = layer.scales.float()
    dequantized_FD = layer(torch.eye(num_inputs))
    if is_from_transformers:
        config = GPTQConfig(bits, group_size=group_size, desc_act=has_activation_order, sym=is_symmetric).to_dict()
    else:
        config = BaseQuantizeConfig(bits, group_size, desc_act=has_activation_order, sym=is_symmetric).to_dict()
    return Packed(config, tensors, dequantized_FD.t(), weight_DF, f"int{bits}")


def pack_gptqmodel(weight_DF: Tensor, *, checkpoint_format: FORMAT, group_size: int = 32) -> Packed:
    """Pack with GPTQModel, 4 bits with zero points.

    Its version 2 stores zero points as they are. For version 1 it subtracts 0x11111111 from whole words: a zero point
    of 0 borrows from its neighbour in the word, and only the sum of the whole word and 0x11111111 undoes that.
    """
    num_outputs, num_inputs = weight_DF.shape
    config = gptqmodel_config.QuantizeConfig(group_size=group_size, desc_act=False, sym=False, format=checkpoint_format)
    quantizer = GPTQModelQuantizer(config)
    quantizer.configure(perchannel=True)
    group_of_input = torch.arange(num_inputs, dtype=torch.int32) // group_size
    rounded_DF, scales, zeros = quantize_groups(quantizer, weight_DF, group_of_input)
    layer = TorchQuantLinear(config.bits, group_size, config.sym, config.desc_act, num_inputs, num_outputs)
    layer.pack(linear_of(rounded_DF), scales, zeros, group_of_input)
    layer.post_init()
    if checkpoint_format == FORMAT.GPTQ:
        convert_gptq_v2_to_v1_format_module(layer, config)
    tensors = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    if checkpoint_format == FORMAT.GPTQ:  # Done to every such checkpoint when GPTQModel loads it.
        convert_gptq_v1_to_v2_format_module(layer, config.bits, config.pack_dtype)
    layer.scales = layer.scales.float()
    # These are the entries of `meta` that GPTQModel's `save_quantized` sets.
    config.meta_set_versionable("quantizer", [f"gptqmodel:{gptqmodel.__version__}"])
    config.meta_set("uri", gptqmodel_config.META_VALUE_URI)
    for key in ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse"):
        config.meta_set(key, getattr(config, key))
    return Packed(config.to_dict(), tensors, layer.dequantize_weight().t(), weight_DF)


def quantize_groups(quantizer: nn.Module, weight_DF: Tensor, group_of_input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrix rounded to codes, as floats, and the scales and zero points [outputs, groups] of all groups."""
    rounded_DF, scales, zeros = torch.empty_like(weight_DF), [], []
    for group in range(int(group_of_input.max()) + 1):
        inputs = group_of_input == group
        quantizer.find_params(weight_DF[:, inputs], weight=True)
        rounded_DF[:, inputs] = quantizer.quantize(weight_DF[:, inputs])
        scales.append(quantizer.scale)
        zeros.append(quantizer.zero)
    return rounded_DF, torch.cat(scales, dim=1), torch.cat(zeros, dim=1)


def pack_compressed(weight_DF: Tensor, *, preset: str, dtype: torch.dtype = torch.float16, **overrides: Any) -> Packed:
    """Pack with compressed-tensors, by one of its presets; `overrides` replace fields of the preset's weights."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = QuantizationArgs(**{**scheme.weights.model_dump(), **overrides})
    linear = linear_of(weight_DF.to(dtype))
    model = nn.Module()
    model.lm_head = nn.Linear(1, 1)  # Not quantized, so that the config has a list of what to ignore.
    parent = model
    *path, name = LAYER.split(".")
    for part in path:
        parent.add_module(part, nn.Module())
        parent = getattr(parent, part)
    parent.add_module(name, linear)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    observe(linear, scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as directory:
        compressor.update_config(directory)
        written = json.loads((Path(directory) / "config.json").read_text())
    tensors = {name: tensor.detach() for name, tensor in linear.state_dict().items()}
    # Scales in float32 make the product float32. MXFP4 alone is de-quantized in bfloat16 whatever the scales are, which
    # is exact: its scales are powers of two, and its codes have two significant bits.
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    written_format = written["quantization_config"]["format"]
    dequantize = BaseCompressor.get_value_from_registry(written_format).decompress
    dequantized_DF = dequantize(wide, linear.quantization_scheme)["weight"].float()
    code_type = f"{scheme.weights.type}{scheme.weights.num_bits}"
    return Packed(written["quantization_config"], tensors, dequantized_DF, weight_DF, code_type)


def observe(linear: nn.Linear, scheme: QuantizationScheme) -> None:
    """Set the scales and zero points of `linear` from the extremes of its weights.

    If the scheme has activation order, `weight_g_idx` is set first: inputs belong to groups by a random permutation.
    """
    weight_DF = linear.weight.data
    if hasattr(linear, "weight_g_idx"):
        order = torch.randperm(weight_DF.shape[1])
        linear.weight_g_idx.data[order] = torch.arange(len(order), dtype=torch.int32) // scheme.weights.group_size
        weight_DF = weight_DF[:, order]
    if scheme.weights.strategy == "tensor":
        smallest, largest = weight_DF.min(), weight_DF.max()
    elif scheme.weights.strategy == "channel":
        smallest, largest = weight_DF.amin(1, keepdim=True), weight_DF.amax(1, keepdim=True)
    elif scheme.weights.strategy == "block":
        block_rows, block_columns = scheme.weights.block_structure
        blocks = weight_DF.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
        smallest, largest = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        grouped = weight_DF.unflatten(1, (-1, scheme.weights.group_size))
        smallest, largest = grouped.amin(-1), grouped.amax(-1)
    scales, zeros = calculate_qparams(smallest, largest, scheme.weights)
    linear.weight_scale.data.copy_(scales)
    linear.weight_zero_point.data.copy_(zeros)


def linear_of(weight_DF: Tensor) -> nn.Linear:
    """Return a linear layer without bias that has the weights `weight_DF` in their dtype."""
    linear = nn.Linear(weight_DF.shape[1], weight_DF.shape[0], bias=False)
    linear.weight = nn.Parameter(weight_DF.clone(), requires_grad=False)
    return linear


@dataclass(frozen=True)
class Case:
    """A matrix and how to pack it.

    `positive` and `negative` name parts (output, first input) of 32 inputs that have no weights of the other sign. If
    they fill a group, its zero point is the smallest code (`positive`) or the largest. With `has_wide_range`, blocks of
    32 inputs are multiplied by random powers of two.
    """

    shape: tuple[int, int]
    pack: Callable[[Tensor], Packed]
    positive: tuple[tuple[int, int], ...] = ()
    negative: tuple[tuple[int, int], ...] = ()
    has_wide_range: bool = False

    def weight(self) -> Tensor:
        weight_DF = torch.randn(self.shape) * STANDARD_DEVIATION
        if (
            self.has_wide_range
        ):  # Otherwise nearly all groups would have the same scale, where scales are powers of two.
            weight_DF *= torch.exp2(torch.randint(-4, 3, (self.shape[0], self.shape[1] // 32))).repeat_interleave(32, 1)
        for sign, parts in ((1, self.positive), (-1, self.negative)):
            for output, first_input in parts:
                weight_DF[output, first_input : first_input + 32] = sign * weight_DF[output, first_input:][:32].abs()
        return weight_DF


# AutoGPTQ stores a zero point of 0 as −1, that is 32 set bits shifted to its place in the word, which overwrite all
# higher places. Its files are sound only if such an output has the highest of the word's eight places.
LAST_IN_WORD = ((7, 0), (15, 32), (63, 96))
ANYWHERE_IN_WORD = ((0, 0), (1, 0), (12, 32), (23, 64), (40, 96), (47, 96))
NEGATIVE = ((3, 0), (13, 32), (24, 64))
POSITIVE_ROWS = tuple((output, first_input) for output in range(32) for first_input in (0, 32))

CASES = {
    "awq": Case((64, 192), partial(pack_awq, group_size=64), ((5, 0), (5, 32)), ((14, 64), (14, 96))),
    "gptq_v1": Case((64, 128), partial(pack_auto_gptq, is_from_transformers=True), LAST_IN_WORD, NEGATIVE),
    "gptq_v1_borrow": Case(
        (64, 128), partial(pack_gptqmodel, checkpoint_format=FORMAT.GPTQ), ANYWHERE_IN_WORD, NEGATIVE
    ),
    "gptq_v2": Case((64, 128), partial(pack_gptqmodel, checkpoint_format=FORMAT.GPTQ_V2), ANYWHERE_IN_WORD, NEGATIVE),
    "gptq_8bit": Case((64, 128), partial(pack_auto_gptq, bits=8, group_size=-1, is_symmetric=True)),
    "gptq_actorder": Case((64, 160), partial(pack_auto_gptq, is_symmetric=True, has_activation_order=True)),
    "compressed_int4_group": Case(
        (64, 128), partial(pack_compressed, preset="W4A16", group_size=64, dtype=torch.bfloat16)
    ),
    "compressed_int4_zeros": Case(
        (72, 128),
        partial(pack_compressed, preset="W4A16_ASYM", group_size=32),
        ((0, 0), (33, 32), (71, 96)),
        ((1, 0), (34, 64)),
    ),
    "compressed_int8_channel": Case((64, 128), partial(pack_compressed, preset="W8A8")),
    "compressed_int8_packed": Case(
        (64, 136), partial(pack_compressed, preset="W8A16", strategy="channel", group_size=None)
    ),
    "compressed_actorder": Case((64, 160), partial(pack_compressed, preset="W4A16", group_size=32, actorder="group")),
    "compressed_int8_tensor": Case((64, 128), partial(pack_compressed, preset="W8A8", strategy="tensor")),
    "mxfp4": Case((64, 128), partial(pack_compressed, preset="MXFP4A16", dtype=torch.bfloat16), has_wide_range=True),
    "compressed_int8_zeros_channel": Case(
        (32, 64), partial(pack_compressed, preset="W8A8", symmetric=False), ((0, 0), (0, 32)), ((31, 0), (31, 32))
    ),
    "compressed_int8_zeros_tensor": Case(
        (32, 64), partial(pack_compressed, preset="W8A8", symmetric=False, strategy="tensor"), POSITIVE_ROWS
    ),
    "compressed_int8_zeros_packed": Case(
        (32, 64),
        partial(pack_compressed, preset="W8A16", symmetric=False, strategy="tensor", group_size=None),
        POSITIVE_ROWS,
    ),
    "gptq_8bit_zeros": Case((32, 64), partial(pack_auto_gptq, bits=8), ((7, 0), (31, 32)), NEGATIVE[:1]),
    "compressed_float8_channel": Case((32, 64), partial(pack_compressed, preset="FP8_DYNAMIC", dtype=torch.bfloat16)),
    # Blocks of the preset, 128 × 128, would need a file of 160 KB.
    "compressed_float8_block": Case(
        (64, 128), partial(pack_compressed, preset="FP8_BLOCK", dtype=torch.bfloat16, block_structure=[32, 64])
    ),
}


def make(directory: Path, case: Case, seed: int) -> None:
    """Write the files of one case; RuntimeError if what the library packed is not close to the matrix it was given."""
    torch.manual_seed(seed)
    packed = case.pack(case.weight())
    floats_DF = packed.dequantized.contiguous()
    if floats_DF.shape != packed.original.shape or floats_DF.dtype != torch.float32:
        raise RuntimeError(f"{directory.name}: the library returned {floats_DF.dtype} of {tuple(floats_DF.shape)}")
    error = ((floats_DF - packed.original).norm() / packed.original.norm()).item()
    print(f"{directory.name}: relative error {error:.4f}")
    if error > MAX_ERRORS[packed.code_type]:
        raise RuntimeError(f"{directory.name}: the floats differ from the matrix by {error:.4f} of it")
    tensors = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in packed.tensors.items()}
    for name, tensor in tensors.items():
        print(f"    {name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    directory.mkdir(parents=True, exist_ok=True)
    config = {"quantization_config": packed.quantization_config}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_file({f"{LAYER}.weight": floats_DF}, directory / "dequantized.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("tests/golden/quantized"))
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="make these alone"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # The libraries compile parts, which would need a C++ compiler.
    print(f"compressed-tensors {compressed_tensors.__version__}, gptqmodel {gptqmodel.__version__}")
    for seed, name in enumerate(CASES):
        if name in arguments.only:
            make(arguments.directory / name, CASES[name], seed)
