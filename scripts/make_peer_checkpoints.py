"""Writes the built-in model's de-quantized weights for other engines, exactly as this engine computes with them.

It writes Hugging Face safetensors (queries and keys in the order of Hugging Face's rotary embedding) and GGUF without
quantization, each in float32 and in bfloat16. Needs no torch.

    python scripts/make_peer_checkpoints.py --output checkpoints          # hf-f32, hf-bf16, f32.gguf, bf16.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jpaged.config.engine_config import DEFAULT_MODEL
from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.opening.gguf_checkpoint import GGUFCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.startup.model_source import resolve_model
from jpaged.text.tokenizing.tokenizer import load_tokenizer

HF_DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
GGUF_TYPES = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
KEYS_OF_THE_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")
"""Metadata that gguf.GGUFWriter writes by itself, as it does all keys that begin with "GGUF."."""


def hf_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for a LlamaForCausalLM."""
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_context_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.source["rope_parameters"]["rope_theta"],
        "rope_parameters": config.source["rope_parameters"],
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype],
    }


def write_hf(checkpoint: GGUFCheckpoint, config: DecoderConfig, dtype: str, directory: Path) -> None:
    """Write a directory that transformers and vLLM can load."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.read(name, slice(None)).astype(HF_DTYPES[dtype]) for name in checkpoint.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(config, dtype), indent=1) + "\n")
    load_tokenizer(checkpoint.path).backend.save(str(directory / "tokenizer.json"))


def write_gguf(checkpoint: GGUFCheckpoint, dtype: str, path: Path) -> None:
    """Copy the checkpoint's file with its matrices in `dtype`; vectors stay float32, as llama.cpp needs them."""
    file = checkpoint.file
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
    reader = gguf.GGUFReader(file.path)  # It is slow, but it keeps the types of metadata.
    for field in reader.fields.values():
        if field.name in KEYS_OF_THE_WRITER or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    writer.add_file_type(FILE_TYPES[dtype])
    for name, tensor in file.tensors.items():
        values = file.read_rows(name, slice(None)).reshape(tensor.shape)
        kind = GGUF_TYPES["f32" if len(tensor.shape) == 1 else dtype]
        data = values.astype(np.float32) if kind == GGUF_TYPES["f32"] else gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a built-in model, or a .gguf file of the Llama family")
    parser.add_argument("--output", type=Path, required=True, help="directory")
    args = parser.parse_args()
    config, checkpoint = open_checkpoint(resolve_model(args.model).path)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise SystemExit(f"--model: {args.model} is not a GGUF file; other engines can load it as it is")
    for dtype in HF_DTYPES:
        write_hf(checkpoint, config, dtype, args.output / f"hf-{dtype}")
        write_gguf(checkpoint, dtype, args.output / f"{dtype}.gguf")
        print(f"{dtype}: done", flush=True)


if __name__ == "__main__":
    main()
