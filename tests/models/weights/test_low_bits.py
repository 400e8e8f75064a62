"""GGUF files of types of 1 to 4 bits: what they take in memory, what they compute, and what a start says of them."""

import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jpaged import ConfigError, Engine, ModelLoadError
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.pallas_kernels.code_formats import CODE_FORMATS
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.native.products import chain
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf
from .test_coded import ENGINE, formats_of, loaded, logits_of

pytestmark = pytest.mark.usefixtures("few_buckets")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 70, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": 256, "self_attn.k_proj": 64, "self_attn.v_proj": 64, "self_attn.o_proj": 256,
    "mlp.gate_proj": 256, "mlp.up_proj": 256, "mlp.down_proj": 256,
}  # fmt: skip
"""Name in a layer → rows of Wᵀ."""
OF_EACH_KIND = ["Q2_K", "IQ4_XS", "IQ2_S", "IQ3_S", "IQ1_M"]
KINDS = [name for name, code_format in CODE_FORMATS.items() if code_format.is_in_quads]


def write_file(directory: Path, kinds: dict[str, str], *, num_layers: int = 2) -> Path:
    """Write a small model whose matrices have these types, by parts of their names, and the others Q8_0."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens", "lm_head"), (70, 256))
    shapes |= {"model.norm": (256,)}
    for layer in (f"model.layers.{i}" for i in range(num_layers)):
        shapes |= {f"{layer}.{name}": (num_rows, 256) for name, num_rows in MATRICES.items()}
        shapes |= {f"{layer}.{name}_layernorm": (256,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": (0.3 * rng.normal(size=of)).astype(np.float32) for name, of in shapes.items()}

    def kind_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType[next((kind for part, kind in kinds.items() if part in name), "Q8_0")]

    config = CONFIG | {"num_hidden_layers": num_layers, "tie_word_embeddings": False}
    return convert_to_gguf(directory / "m.gguf", config, tensors, kind=kind_of)


def mixed(kinds: Sequence[str]) -> dict[str, str]:
    """Return the types of matrices that together have all of these: an embedding of Q2_K, as files of IQ2 have."""
    names = (f"layers.{i}.{name}" for i in range(2) for name in MATRICES)
    return {"embed_tokens": "Q2_K", "lm_head": "Q2_K"} | dict(zip(names, itertools.cycle(kinds)))


@pytest.mark.parametrize("kinds", [OF_EACH_KIND, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("is_decoded", [True, False])
def test_types_stay_codes_and_logits_are_those_of_the_decoded_weights(
    tmp_path: Path,
    is_decoded: bool,
    kinds: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """They have the same bits where codes are decoded, and are within 1e-5 as integers; memory is that of the file."""
    if is_decoded:
        monkeypatch.setattr(chain, "has_integer_products", lambda parts: False)
    else:
        monkeypatch.setattr(chain, "has_amx_unit", lambda: False)
    request.addfinalizer(jax.clear_caches)
    jax.clear_caches()  # Traces of the same shapes are of other products.
    path = write_file(tmp_path, mixed(kinds), num_layers=1 if len(kinds) <= len(MATRICES) else 2)
    coded, plain = (loaded(path, "float32", keeps_codes=keeps_codes) for keeps_codes in (True, False))
    kept = formats_of(coded)
    assert {name for parts in kept.values() for name, _ in parts} >= set(kinds)
    assert kept["embed"] == [("Q2_K", 70)]
    logits = [logits_of(weights) for weights in (coded, plain)]
    if is_decoded:
        np.testing.assert_array_equal(*logits)
    else:
        assert np.abs(logits[0] - logits[1]).max() < 1e-5 * np.abs(logits[1]).max()
    _, checkpoint = open_checkpoint(path)
    stored_bytes = sum(each.size_bytes for each in checkpoint.file.tensors.values())  # type: ignore[attr-defined]
    # The table and the head have 70 rows, which are padded to 96.
    assert coded.size_bytes < 1.1 * stored_bytes + 26 * 256


def test_a_scale_that_is_not_finite_is_refused_by_its_tensor(tmp_path: Path) -> None:
    path = write_file(tmp_path, {"layers.1.mlp.down_proj": "IQ1_M"})
    _, checkpoint = open_checkpoint(path)
    tensor = checkpoint.file.tensors["blk.1.ffn_down.weight"]  # type: ignore[attr-defined]
    content = bytearray(path.read_bytes())
    for byte, bits in zip((49, 51, 53, 55), (0x00, 0xC0, 0xF0, 0x70), strict=True):
        content[tensor.offset + byte] = content[tensor.offset + byte] & 15 | bits
    path.write_bytes(content)
    message = r"tensor model.layers.1.mlp.down_proj.weight holds a NaN or an infinity.* in rows 0 to"
    with pytest.raises(ModelLoadError, match=message):
        loaded(path, "float32", keeps_codes=True)


def test_plain_xla_makes_all_of_them_floats(tmp_path: Path) -> None:
    config, checkpoint = open_checkpoint(write_file(tmp_path, mixed(KINDS)))
    mesh = device_mesh(jax.devices()[:1])
    formats = tuple((name, checkpoint.code_format(name)) for name in checkpoint.names())  # type: ignore[attr-defined]
    kept, floats = (
        load_weights(abstract_weights(config, "float32", mesh, XLA_OPS, of), config, checkpoint) for of in (formats, ())
    )
    assert {name for parts in formats_of(kept).values() for name, _ in parts} <= {"Q8_0"}
    np.testing.assert_allclose(logits_of(kept), logits_of(floats), rtol=1e-5, atol=1e-5)


FLOATS = {
    # A type that is never kept, and one that plain XLA does not keep.
    "TQ1_0": ("auto", "2 of 21 tensors are of TQ1_0", r"2\.76e-05 GB in the file, 0\.000524 GB as float32"),
    "IQ3_S": ("xla", "2 of 21 tensors are of IQ3_S", r"5\.63e-05 GB in the file, 0\.000524 GB as float32"),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_a_start_says_what_types_that_become_floats_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It says so before memory is planned, which may be too small for the floats, and here is for the pages."""
    backend, names, sizes = FLOATS[kind]
    options: dict[str, Any] = {**ENGINE, "num_blocks": 10**9, "attention_backend": backend}
    for quantization, is_said in {"auto": True, "none": False}.items():
        caplog.clear()
        with pytest.raises(ConfigError, match="num_blocks"):
            Engine(str(write_file(tmp_path, {"up_proj": kind})), quantization=quantization, **options)
        warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        message = rf"^weights: {names} and become floats: {sizes}; take the model in Q4_0, Q5_0 or Q8_0, which"
        assert any(re.search(message, each) for each in warnings) is is_said
