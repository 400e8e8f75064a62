"""Matrices of a quantized file stay codes: which ones, with which results, and what cannot be done with them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from jpaged import ConfigError, Engine, ModelLoadError, SamplingParams
from jpaged.models.dense import dense_logits
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.at_load import QuantizedCheckpoint, format_at_load, formats_at_load
from jpaged.models.weights.coded import StoredFormats, refuse_floats, stored_formats
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.kept_weights import KeptWeights, file_states
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights, tensor_shapes
from jpaged.models.weights.saving import save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.code_formats import decode, float8_format, quantize
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.products import chain
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf

pytestmark = pytest.mark.usefixtures("few_buckets")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 70, "hidden_size": 128, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (96, 128), "mlp.up_proj": (96, 128), "mlp.down_proj": (128, 96),
}  # fmt: skip
KINDS = {"v_proj": "Q8_0", "down_proj": "Q5_1", "up_proj": "Q5_0", "embed_tokens": "Q8_0"}
"""Matrices that are stored in another type than Q4_0."""
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_blocks": 16, "max_num_seqs": 4, "weights_cache_dir": "off", "warmup": "off",
    "num_decode_steps": 1,
}  # fmt: skip


def kind_of(name: str) -> GGMLQuantizationType:
    """Return the type that a matrix is stored in: F16 for the last layer's output of attention."""
    if "layers.1.self_attn.o_proj" in name:
        return GGMLQuantizationType.F16
    (kind,) = [kind for part, kind in KINDS.items() if part in name] or ["Q4_0"]
    return GGMLQuantizationType[kind]


def write_file(directory: Path, *, is_tied: bool = False, kind: Any = kind_of, has_biases: bool = False) -> Path:
    """Write a small model whose matrices are stored in several types, or all in one `kind`; with biases a Qwen2."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (70, 128), "model.norm.weight": (128,)}
    if not is_tied:
        shapes["lm_head.weight"] = (70, 128)
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (128,)
        if has_biases:
            of_qkv = (f"model.layers.{layer}.self_attn.{name}_proj" for name in "qkv")
            shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in of_qkv}
    tensors = {name: (0.3 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
    config = CONFIG | {"tie_word_embeddings": is_tied}
    if has_biases:
        config["architectures"] = ["Qwen2ForCausalLM"]
    return convert_to_gguf(directory / "m.gguf", config, tensors, kind=kind)


def loaded(path: Path, dtype: str, *, keeps_codes: bool) -> Weights:
    config, checkpoint = open_checkpoint(path)
    formats: StoredFormats = stored_formats(checkpoint) if keeps_codes else ()
    abstract = abstract_weights(config, dtype, device_mesh(jax.devices()[:1]), NATIVE_OPS, formats)
    check_tensors(abstract, config, checkpoint)
    return load_weights(abstract, config, checkpoint)


def logits_of(weights: Weights) -> np.ndarray:
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 70, (2, 20)))
    mesh = next(iter(jax.tree.leaves(weights.state))).sharding.mesh
    with jax.set_mesh(mesh):
        run = jax.jit(lambda state: dense_logits(nnx.merge(weights.graph, state), ids))
        return np.asarray(run(weights.state))[..., :70]


def formats_of(weights: Weights) -> dict[str, list[tuple[str, int]]]:
    """Return the formats of the columns of each matrix that is kept as codes."""
    return {
        ".".join(map(str, path[:-1])): [
            (code_format.name, size) for code_format, size in leaf.get_metadata()["code_parts"]
        ]
        for path, leaf in nnx.to_flat_state(weights.state)
        if "code_parts" in leaf.get_metadata()
    }


def assert_near(found: Any, wanted: Any, dtype: str = "float32") -> None:
    """Compare tokens and their logprobs, of `logprobs_of`, with those of decoded weights in this dtype.

    Where codes are multiplied as integers, weights are not rounded to bfloat16, which moves logprobs by hundredths.
    """
    for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(found, wanted, strict=True):
        assert ids == wanted_ids
        chosen, wanted_chosen = (
            [of_token[token].logprob for token, of_token in zip(ids, each, strict=True)]
            for each in (logprobs, wanted_logprobs)
        )
        np.testing.assert_allclose(chosen, wanted_chosen, atol=2e-5 if dtype == "float32" else 0.1)


LOGITS = [(False, "float32", False), (False, "bfloat16", True), (True, "float32", True), (True, "bfloat16", False)]
"""Whether codes are decoded, dtype, and whether the table is the head: every pair of these, for every run."""


@pytest.mark.parametrize(
    ("is_decoded", "dtype", "is_tied"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in LOGITS))
        for case in itertools.product((False, True), ("float32", "bfloat16"), (False, True))
    ],
)
def test_logits_are_those_with_decoded_weights(
    tmp_path: Path,
    is_decoded: bool,
    dtype: str,
    is_tied: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """They have the same bits where codes are decoded, and are as near as float32's own errors as integers."""
    if is_decoded:
        monkeypatch.setattr(chain, "has_integer_products", lambda parts: False)
        request.addfinalizer(jax.clear_caches)
        jax.clear_caches()  # Traces of the same shapes are of integers, and those of this test are not.
    path = write_file(tmp_path, is_tied=is_tied)
    coded, plain = (loaded(path, dtype, keeps_codes=keeps_codes) for keeps_codes in (True, False))
    logits = [logits_of(weights) for weights in (coded, plain)]
    if is_decoded:
        np.testing.assert_array_equal(*logits)
    else:
        norms = np.linalg.norm(logits[1], axis=-1, keepdims=True)
        assert (np.abs(logits[0] - logits[1]) / norms).max() < (1e-5 if dtype == "float32" else 1e-2)
    layer = {
        "attention.qkv_proj": [("Q4_0", 192), ("Q8_0", 64)],
        "attention.o_proj": [("Q4_0", 128)],
        "mlp.gate_up_proj": [("Q4_0", 96), ("Q5_0", 96)],
        "mlp.down_proj": [("Q5_1", 128)],
    }
    wanted = {f"layers.{i}.{name}": parts for i in range(2) for name, parts in layer.items()}
    wanted |= {"embed": [("Q8_0", 70)]} | ({} if is_tied else {"head": [("Q4_0", 70)]})
    del wanted["layers.1.attention.o_proj"]
    assert formats_of(coded) == wanted
    assert coded.size_bytes < 0.5 * plain.size_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_checkpoint_holds_the_decoded_values_in_the_dtype_of_the_run(tmp_path: Path, dtype: str) -> None:
    path = write_file(tmp_path)
    for name, keeps_codes in (("coded", True), ("plain", False)):
        save_checkpoint(loaded(path, dtype, keeps_codes=keeps_codes), tmp_path / name, format="safetensors")
    coded, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("coded", "plain"))
    assert coded.keys() == plain.keys()
    for name, values in plain.items():
        assert coded[name].dtype == values.dtype
        np.testing.assert_array_equal(coded[name], values, err_msg=name)


def test_an_engine_keeps_codes_unless_told_otherwise_and_gives_the_same_logprobs(tmp_path: Path) -> None:
    path, results = write_file(tmp_path), []
    for quantization in ("auto", "none"):
        with Engine(str(path), quantization=quantization, **ENGINE) as engine:
            results.append(logprobs_of(engine))
            tree = {"model.norm.weight": np.ones(128, np.float32)}
            wanted = (
                "kept as codes of Q5_1, wanted codes under the paths" if quantization == "auto" else "missing: lm_head"
            )
            with pytest.raises(ModelLoadError, match=wanted):
                engine.update_params(tree)
    assert_near(*results)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("keeps_codes", [True, False])
def test_a_scale_that_is_not_finite_is_refused_by_its_tensor(tmp_path: Path, keeps_codes: bool) -> None:
    """The error is all that is printed: numpy would warn of ∞ × 0."""
    path = write_file(tmp_path)
    _, checkpoint = open_checkpoint(path)
    tensor = checkpoint.file.tensors["blk.1.ffn_down.weight"]  # type: ignore[attr-defined]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=r"tensor model.layers.1.mlp.down_proj.weight holds a NaN or an infinity.* in rows"
    ):
        loaded(path, "float32", keeps_codes=keeps_codes)


AT_LOAD = ("int8", "fp8", "int4")


def logprobs_of(engine: Engine) -> list[Any]:
    outputs = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=12, logprobs=3))
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        pytest.param(quantization, dtype, marks=[pytest.mark.slow] * ((quantization, dtype) != ("fp8", "bfloat16")))
        for quantization in AT_LOAD
        for dtype in ("float32", "bfloat16")
    ],
)
def test_floats_are_quantized_as_they_are_read_and_as_they_are_given(
    tmp_path: Path, quantization: str, dtype: str
) -> None:
    """The results are those of the numbers that the codes stand for, also when weights are read or given again."""
    floats = write_file(tmp_path, kind=GGMLQuantizationType.BF16)
    _, checkpoint = open_checkpoint(floats)
    tensors = {name: checkpoint.read(name, slice(None)) for name in checkpoint.names()}
    decoded = {
        name: values
        if (code_format := format_at_load(quantization, values.shape)) is None
        else decode(quantize(values, code_format), code_format)
        for name, values in tensors.items()
    }
    with Engine(str(floats), params=decoded, quantization="none", dtype=dtype, **ENGINE) as engine:
        wanted = logprobs_of(engine)
    with Engine(str(floats), quantization=quantization, dtype=dtype, **ENGINE) as engine:
        assert_near(found := logprobs_of(engine), wanted, dtype)
        engine.sleep(level=2)
        engine.wake_up()
        assert logprobs_of(engine) == found
        engine.update_params({name: values / 2 for name, values in tensors.items()})
        assert logprobs_of(engine) != found
        engine.update_params({name: jnp.asarray(values) for name, values in tensors.items()})
        assert logprobs_of(engine) == found


def test_norms_and_biases_are_not_quantized_and_embeddings_and_heads_are(tmp_path: Path) -> None:
    floats = write_file(tmp_path, kind=GGMLQuantizationType.F32)
    config, checkpoint = open_checkpoint(floats)
    formats = stored_formats(QuantizedCheckpoint(checkpoint, "fp8"))
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), NATIVE_OPS, formats)
    kept = {path for path, leaf in nnx.to_flat_state(abstract.state) if "code_parts" not in leaf.get_metadata()}
    assert kept
    assert all("norm" in path[-2] for path in kept)
    assert dict(formats)["lm_head.weight"].key == float8_format(128).key  # type: ignore[union-attr]


def test_random_weights_are_quantized_too(tmp_path: Path) -> None:
    """int8 changes logits a little, and takes a quarter of the memory."""
    path, logits, sizes = write_file(tmp_path), [], []
    config, _ = open_checkpoint(path)
    mesh = device_mesh(jax.devices()[:1])
    for formats in ((), formats_at_load("int8", tensor_shapes(config, mesh))):
        weights = dummy_weights(abstract_weights(config, "float32", mesh, NATIVE_OPS, formats))
        logits.append(logits_of(weights))
        sizes.append(weights.size_bytes)
    assert sizes[1] < 0.3 * sizes[0]
    assert 0 < np.abs(logits[1] - logits[0]).max() < 0.05 * np.abs(logits[0]).max()
    # Of the dtype whose programs the test of floats that are quantized as they are read compiles too.
    with Engine(str(path), load_format="dummy", quantization="fp8", dtype="bfloat16", **ENGINE) as engine:
        assert logprobs_of(engine)


def test_codes_under_the_engines_own_paths_are_taken(tmp_path: Path) -> None:
    """A file of formats that take no floats is updated by the codes of another engine."""
    path = write_file(tmp_path)
    with Engine(str(path), **ENGINE) as engine:
        wanted = logprobs_of(engine)
        state = {
            ".".join(map(str, p)): leaf[...]
            for p, leaf in nnx.to_flat_state(loaded(path, "float32", keeps_codes=True).state)
        }
        panel_bytes = state["head.weight"].size // 3
        changed = state | {"head.weight": jnp.roll(state["head.weight"], panel_bytes)}
        engine.update_params(changed)
        assert logprobs_of(engine) != wanted
        engine.update_params(state)
        assert logprobs_of(engine) == wanted
        head = np.asarray(state["head.weight"])
        for wrong, message in ((head.astype(np.float32), "is float32, wanted uint8"), (head | 255, "not finite")):
            with pytest.raises(ModelLoadError, match=f"head.weight .*{message}"):
                engine.update_params(state | {"head.weight": wrong})


def test_numbers_that_are_too_large_for_a_scale_are_refused_as_they_are_read_and_given(tmp_path: Path) -> None:
    floats = write_file(tmp_path, kind=GGMLQuantizationType.F32)
    _, checkpoint = open_checkpoint(floats)
    tensors = {name: checkpoint.read(name, slice(None)) for name in checkpoint.names()}
    large = tensors | {"lm_head.weight": tensors["lm_head.weight"] * 1e7}
    with pytest.raises(ModelLoadError, match=r"lm_head.weight holds a number beyond ±5.24e\+05.*: choose int8 or fp8"):
        Engine(str(floats), params=large, quantization="int4", **ENGINE)
    with Engine(str(floats), quantization="int4", **ENGINE) as engine:
        with pytest.raises(ModelLoadError, match=r"lm_head.weight holds .*, wanted at most 5.24e\+05"):
            engine.update_params(large)
        engine.update_params(tensors)


def test_floats_are_not_quantized_where_that_is_not_possible(tmp_path: Path) -> None:
    path = write_file(tmp_path, kind=GGMLQuantizationType.Q4_0)
    allowed = r" for .*m\.gguf, whose weights are quantized, allowed: auto, which keeps them, or none"
    with pytest.raises(ConfigError, match=f"^quantization: got 'int8'{allowed}"):
        Engine(str(path), quantization="int8", **ENGINE)
    allowed = ", for which no matrix can be kept, allowed: auto, none, or a model of jpaged's families"
    odd = CONFIG | {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1}
    odd |= {"head_dim": 16, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match=f"^quantization: got 'int4'{allowed}"):
        Engine(str(tmp_path), load_format="dummy", quantization="int4", **ENGINE)


def test_a_file_that_is_stored_in_another_format_by_now_is_refused_when_weights_are_read_again(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    with Engine(str(path), **ENGINE) as engine:
        engine.sleep(level=2)
        write_file(tmp_path, kind=GGMLQuantizationType.Q4_1)
        with pytest.raises(ModelLoadError, match=r"is no longer stored as .*: start a new engine"):
            engine.wake_up()


def test_kept_weights_of_one_dtype_do_not_serve_another(tmp_path: Path) -> None:
    """The codes have as many bytes for both, in another order."""
    path = write_file(tmp_path, kind=GGMLQuantizationType.Q8_0)
    config, checkpoint = open_checkpoint(path)
    names = set()
    for dtype in ("float32", "bfloat16"):
        formats = stored_formats(checkpoint)
        abstract = abstract_weights(config, dtype, device_mesh(jax.devices()[:1]), NATIVE_OPS, formats)
        matrices = {p: leaf for p, leaf in nnx.to_flat_state(abstract.state) if "code_parts" in leaf.get_metadata()}
        only_codes = replace(abstract, state=nnx.from_flat_state(matrices))
        names.add(KeptWeights(tmp_path, only_codes, file_states([path]), "").path)
    assert len(names) == 2


def test_plain_arrays_of_a_module_are_no_codes() -> None:
    refuse_floats([np.ones(3, np.float32), jnp.ones(3)])
