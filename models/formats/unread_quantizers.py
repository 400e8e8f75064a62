"""Names the tools whose quantized checkpoints are not read, by what they write into config.json and into safetensors.

`quantization.py` has those that are read. A tool that names itself in `quant_method` is refused there by that name.
"""

from __future__ import annotations

import re

from ..fields import Fields, read_json_object
from .tensor_files import TensorFiles

MODELOPT_FILE = "hf_quant_config.json"
"""The file in which ModelOpt says how a checkpoint is quantized, where config.json does not."""
MLX_KEY = "quantization"
"""The key of config.json that MLX writes its object under, and no tool that is read."""
MLX_KEYS = frozenset({"bits", "group_size", "mode"})
"""Keys of MLX's object beside those that are names of modules, with an object or false for each."""
_TOP_MODULES = ("lm_head", "embed_tokens")
"""Names of modules in MLX's object that have no dot in them."""
_BITSANDBYTES_KEY = re.compile(r"_?load_in_[48]bit|bnb_4bit_.*|llm_int8_.*")
_TOOL_OF_TENSOR = {
    "bitsandbytes": r"\.(SCB|weight_format)|\.weight\.((nested_)?(absmax|quant_map)|quant_state\.bitsandbytes__\w+)",
    "EXL2": r"\.q_(weight|scale|scale_max|groups|group_map|invperm|perm)",
    "EXL3": r"\.(trellis|suh|svh)",
    "HQQ": r"\.W_q",
    "AQLM": r"\.(codes|codebooks)",
    "QuIP#": r"\.Qidxs(_\d+)?",
    "VPTQ": r"\.(res_)?centroids(\.weight)?",
    "quanto": r"\.weight\._(data|scale|shift)(\._data)?",
    "torchao": r"\._weight_(qdata|q_data)",
    "ModelOpt's NVFP4": r"\.weight_scale_2",
}
"""Tool → ends of names that only its tensors have."""


def refuse_by_config(fields: Fields, keys: tuple[str, ...], way_out: str) -> None:
    """Raise ModelLoadError if config.json is of a tool that does not name itself by `quant_method`.

    MLX writes an object `quantization`, and mostly the same under another of the `keys`; bitsandbytes wrote its own
    options alone.
    """
    for key in (MLX_KEY, *keys):
        value = fields.data[key] if fields.has(key) else None
        if not isinstance(value, dict) or (key != MLX_KEY and value.get("quant_method") is not None):
            continue
        if (tool := _tool_of_object(value) or ("another tool" if key == MLX_KEY and value else None)) is not None:
            raise fields.wrong(key, f"none: what {tool} quantized is not read: {way_out}")


def refuse_by_tensors(files: TensorFiles, way_out: str) -> None:
    """Raise ModelLoadError if tensors, of which config.json says nothing, show the tool that quantized them."""
    names, modelopt = files.names(), files.path / MODELOPT_FILE
    if modelopt.is_file():
        quantization = Fields(read_json_object(modelopt), modelopt).mapping("quantization")
        if quantization.has("quant_algo") and quantization.data["quant_algo"] != "FP8":
            wanted = "FP8: what ModelOpt quantized in another way is not read"
            raise quantization.wrong("quant_algo", f"{wanted}: {way_out}")
    ends = {tool: re.compile(f"{pattern}$") for tool, pattern in _TOOL_OF_TENSOR.items()}
    for name in names:
        tool = next((tool for tool, end in ends.items() if end.search(name)), None)
        # MLX's matrices are words under the names of the floats, with scales of groups beside them.
        if files.dtype(name) == "U32" and f"{name.removesuffix('weight')}scales" in names:
            tool = "MLX"
        if tool is not None:
            raise files.fault(name, f"is of a matrix that {tool} quantized, which is not read: {way_out}")


def _tool_of_object(value: dict[str, object]) -> str | None:
    """Return which tool wrote an object about quantization that does not name it; None if the keys do not tell.

    None is also the result for ModelOpt's FP8, which is read if `quant_method` names the tool.
    """
    if any(map(_BITSANDBYTES_KEY.fullmatch, value)):
        return "bitsandbytes"
    inner = value.get("quantization")  # ModelOpt's own file has its options one level deeper.
    algorithm = (inner if isinstance(inner, dict) else value).get("quant_algo")
    if algorithm is not None:
        return None if algorithm == "FP8" else f"ModelOpt ({algorithm})"
    rules = {key: rule for key, rule in value.items() if key not in MLX_KEYS}
    objects = [rule for rule in rules.values() if isinstance(rule, dict)]
    flags = [key for key, rule in rules.items() if isinstance(rule, bool)]
    if len(objects) + len(flags) < len(rules) or not all("." in key or key in _TOP_MODULES for key in flags):
        return None  # Options of GPTQ or AWQ, such as `desc_act`.
    is_mlx = any({"bits", "group_size"} <= options.keys() for options in (value, *objects))
    return "MLX" if is_mlx else None
