"""A GGUF file as a checkpoint: its tensors under Hugging Face names, their rows in Hugging Face's order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, Codes
from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..formats.checkpoint import WHOLE, bounds_of
from ..formats.gguf import GGUFFile
from ..formats.gguf_codes import codes_of

_LAYER = re.compile(
    r"blk\.(?P<layer>0|[1-9][0-9]*)\.(?P<part>[a-z_]+)(\.(?P<expert>0|[1-9][0-9]*))?\.(?P<end>weight|bias)"
)
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
STACKED_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
QWEN_MOE_NAMES = STACKED_EXPERT_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SINKS = "attn_sinks"
GPT_OSS_NAMES = STACKED_EXPERT_NAMES | {
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    SINKS: "self_attn.sinks",
}
# Gemma has a norm behind attention too, which takes the name that the norm in front of the MLP has elsewhere.
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors that the config is read from: they are parts of the rotary embedding and not weights.
CONFIG_TENSORS = ("rope_freqs.weight",)
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantized."""
FLOATS_EVERYWHERE = ("TQ1_0", "NVFP4")
"""Types that are read and never kept: five numbers of the first share a byte, and scales of the second are small
floats."""


@dataclass(frozen=True)
class GGUFFormat:
    """How llama.cpp's converter writes the tensors of one architecture."""

    layer_names: dict[str, str]
    """Name in a layer → Hugging Face's name in a layer."""
    permutes_heads: bool = False
    """Rows of q and k interleave each head's two halves, for a rotary embedding that rotates neighbouring lanes."""
    norms_hold_one_more: bool = False
    """Gains of norms are stored as 1 + w."""
    may_lack_biases: bool = True
    """A file may have biases of some matrices, or of some layers, alone; the others have none."""


FORMATS = {
    "llama": GGUFFormat(LAYER_NAMES | MIXTRAL_NAMES, permutes_heads=True),
    "qwen2": GGUFFormat(LAYER_NAMES, may_lack_biases=False),
    "qwen3": GGUFFormat(LAYER_NAMES | QK_NORM_NAMES),
    "qwen2moe": GGUFFormat(LAYER_NAMES | QWEN_MOE_NAMES, may_lack_biases=False),
    "qwen3moe": GGUFFormat(LAYER_NAMES | QK_NORM_NAMES | QWEN_MOE_NAMES),
    "gpt-oss": GGUFFormat(LAYER_NAMES | GPT_OSS_NAMES, may_lack_biases=False),
    "gemma2": GGUFFormat(GEMMA_LAYER_NAMES, norms_hold_one_more=True),
    "gemma3": GGUFFormat(GEMMA_LAYER_NAMES | QK_NORM_NAMES, norms_hold_one_more=True),
}
"""`general.architecture` → format."""


class GGUFCheckpoint:
    """A GGUF file whose tensors have Hugging Face names; `read` de-quantizes to float32, `read_codes` does not.

    A tensor without a Hugging Face name keeps its own name. `read` undoes what llama.cpp's converter did to rows and
    gains: see `GGUFFormat`. Biases that the model has and the file lacks are zeros.
    """

    def __init__(self, file: GGUFFile, config: DecoderConfig):
        """Serve the tensors of a parsed file; its `general.architecture` must be one of FORMATS."""
        self.file = file
        self.path = file.path
        self._head_size = config.head_size
        self._format = FORMATS[file.metadata["general.architecture"]]
        self._stored = {self._hf_name(name): name for name in file.tensors if name not in CONFIG_TENSORS}
        self._zero_biases = self._absent_biases(config) if self._format.may_lack_biases else {}

    @property
    def is_quantized(self) -> bool:
        """Return whether a tensor is quantized, also in a type whose codes cannot be kept."""
        return any(self.file.tensors[stored].type_name not in FLOAT_TYPES for stored in self._stored.values())

    def names(self) -> Collection[str]:
        """Return the names of all tensors except those that belong to the config."""
        return (self._stored | self._zero_biases).keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        if name in self._zero_biases:
            return (self._zero_biases[name],)
        shape = self.file.tensors[self._stored[name]].shape
        # llama.cpp's converter drops the axis of the one output of this matrix.
        return (1, *shape) if name.endswith(".shared_expert_gate.weight") and len(shape) == 1 else shape

    def dtype(self, name: str) -> str:
        """Return float32, which `read` gives whatever the file stores."""
        return "float32"

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis and `columns` of the second, as float32 and in Hugging Face's order.

        A tensor of all experts counts as a matrix, as in `Checkpoint`; `columns` are ignored for a vector. In formats
        that interleave the halves of query and key heads, rows are put back in order, and in formats that store gains
        of norms as 1 + w, 1 is subtracted. Raises ModelLoadError for a quantization that the gguf package cannot read.
        """
        shape = self.shape(name)
        start, stop = bounds_of(rows, math.prod(shape[:-1]) if len(shape) > 1 else shape[0])
        if name in self._zero_biases:
            return np.zeros(stop - start, np.float32)
        stored = self._stored[name]
        stored_rows = self._rows_in_file(name, start, stop)
        try:
            if len(shape) > 1:
                return self.file.read_rows(stored, stored_rows)[:, columns]
            # The file holds a vector as one row, which is read whole; its values are picked then.
            values = self.file.read_rows(stored, WHOLE)[0][stored_rows]
        except NotImplementedError as error:
            fault = f"is stored as {self.file.tensors[stored].type_name}, which the gguf package does not de-quantize"
            way_out = "take a file of another quantization"
            raise ModelLoadError(f"{self.path}: tensor {stored!r} {fault}: {way_out}") from error
        return values - 1 if self._format.norms_hold_one_more and "norm" in name else values

    def code_format(self, name: str) -> CodeFormat | None:
        """Return the format of a matrix, or of those of all experts, that the file stores as codes; None for others."""
        if name in self._zero_biases:
            return None
        tensor = self.file.tensors[self._stored[name]]
        return CODE_FORMATS.get(tensor.type_name) if len(tensor.shape) in (2, 3) else None

    def read_codes(self, name: str, rows: slice) -> Codes:
        """Return rows of a matrix as codes, in Hugging Face's order."""
        code_format, shape = self.code_format(name), self.shape(name)
        assert code_format is not None
        start, stop = bounds_of(rows, math.prod(shape[:-1]))
        rows_in_file = self._rows_in_file(name, start, stop)
        codes = codes_of(self.file.stored_rows(self._stored[name], rows_in_file), code_format)
        if isinstance(rows_in_file, slice):  # Rows of heads are put in another order: their neighbours come next.
            self.file.release_rows(self._stored[name], start, stop)
        return codes

    def files(self) -> list[Path]:
        """Return the file, or all parts of a split one."""
        return list(self.file.paths)

    def floats_note(self, dtype: str, kept: Collection[str]) -> str | None:
        """Return a clause for the log about tensors that become floats of `dtype`, with their bytes before and after.

        `kept` are the types whose codes are kept. The result is None if there are no others, but for floats.
        """
        tensors = [self.file.tensors[stored] for stored in self._stored.values()]
        widened = [each for each in tensors if each.type_name not in (*FLOAT_TYPES, *kept)]
        if not widened:
            return None
        names = ", ".join(sorted({each.type_name for each in widened}))
        stored_bytes = sum(each.size_bytes for each in widened)
        float_bytes = sum(math.prod(each.shape) for each in widened) * np.dtype(dtype).itemsize
        sizes = f"{stored_bytes / 1e9:.3g} GB in the file, {float_bytes / 1e9:.3g} GB as {dtype}"
        way_out = "take the model in Q4_0, Q5_0 or Q8_0, which stay quantized everywhere, or on a CPU with the backend "
        way_out += f"native in any type but {' and '.join(FLOATS_EVERYWHERE)}"
        return f"{len(widened)} of {len(tensors)} tensors are of {names} and become floats: {sizes}; {way_out}"

    def _absent_biases(self, config: DecoderConfig) -> dict[str, int]:
        """Return the names and lengths of biases that the model has beside stored matrices, and the file lacks."""
        parts = ["attn_q", "attn_k", "attn_v"] * config.qkv_bias + ["attn_output"] * config.out_bias
        parts += ["ffn_gate", "ffn_up", "ffn_down"] * config.mlp_bias
        modules = [f"model.layers.{i}.{LAYER_NAMES[part]}" for i in range(config.num_layers) for part in parts]
        return {
            f"{module}.bias": self.file.tensors[self._stored[f"{module}.weight"]].shape[0]
            for module in modules
            if f"{module}.bias" not in self._stored and f"{module}.weight" in self._stored
        }

    def _rows_in_file(self, name: str, start: int, stop: int) -> slice | np.ndarray:
        """Return where the rows `start` … `stop` − 1 of a tensor are in the file."""
        if self._format.permutes_heads and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
            return self._stored_rows(np.arange(start, stop))
        return slice(start, stop)

    def _stored_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the row of the file for each of Hugging Face's `rows` of the query or key projection.

        Hugging Face stores the first half of a head's rows and then the second; the file alternates between the halves.
        So row `i` of half 0 or 1 is row 2 i + half of the head in the file. For heads of 4 rows, rows 0, 1, 2 and 3 are
        in the file's rows 0, 2, 1 and 3.
        """
        head, row = np.divmod(rows, self._head_size)
        half, i = np.divmod(row, self._head_size // 2)
        return head * self._head_size + 2 * i + half

    def _hf_name(self, gguf_name: str) -> str:
        """Return Hugging Face's name of a tensor, or its own name if there is none.

        Examples: "blk.3.attn_q.weight" becomes "model.layers.3.self_attn.q_proj.weight", and "blk.3.ffn_gate.7.weight",
        as files of Mixtral from before April 2024 call the matrix of one expert,
        "model.layers.3.block_sparse_moe.experts.7.w1.weight".
        """
        match = _LAYER.fullmatch(gguf_name)
        part = "" if match is None else match["part"] + ("" if match["expert"] is None else "_exps")
        if match is None or part not in self._format.layer_names:
            return NAMES.get(gguf_name, gguf_name)
        name, end = self._format.layer_names[part], "" if part == SINKS else f".{match['end']}"
        if match["expert"] is not None:
            module, _, projection = name.rpartition(".")
            name = f"{module}.{match['expert']}.{projection}"
        return f"model.layers.{match['layer']}.{name}{end}"
