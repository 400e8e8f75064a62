"""Matrices that plain XLA multiplies by codes: with which results, on one device and on several."""

import json
import math
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

from jpaged import Engine, EngineConfig, ModelLoadError, SamplingParams
from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.recipe import Piece
from jpaged.models.weights import code_arrays
from jpaged.models.weights.at_load import QuantizedCheckpoint, format_at_load, formats_at_load
from jpaged.models.weights.code_arrays import FOUR_BITS, Target, held_codes, num_bytes, read_held
from jpaged.models.weights.coded import codes_note, stored_formats
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.live_weights import LiveWeights
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights, tensor_shapes
from jpaged.models.weights.saving import save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.code_formats import CODE_FORMATS, CodeFormat, decode, float8_format, int8_format, quantize
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.scaled_matrix import ScaledMatrix, scaled_columns, scaled_product
from jpaged.sharding import device_mesh, replicated
from jpaged.startup.attention.expected import random_codes
from jpaged.startup.open_model import open_model

from .processes import run_over_devices
from .test_coded import AT_LOAD, ENGINE, logits_of, write_file
from .test_packed_models import MODELS, write_model

pytestmark = pytest.mark.usefixtures("few_buckets")


def numbers_of(tensors: dict[str, np.ndarray], quantization: str) -> dict[str, np.ndarray]:
    """Return the numbers that tensors stand for once they are quantized."""
    formats = {name: format_at_load(quantization, values.shape) for name, values in tensors.items()}
    return {
        name: values if (each := formats[name]) is None else decode(quantize(values, each), each)
        for name, values in tensors.items()
    }


def weights_of(config: DecoderConfig, checkpoint: Any, num_devices: int = 1, dtype: str = "float32") -> Weights:
    """Load a checkpoint for plain XLA; what it has as codes stays so."""
    mesh = device_mesh(jax.devices()[:num_devices])
    abstract = abstract_weights(config, dtype, mesh, XLA_OPS, stored_formats(checkpoint))
    check_tensors(abstract, config, checkpoint)
    return load_weights(abstract, config, checkpoint)


def model(directory: Path, *, is_tied: bool, has_biases: bool = False) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """Return a model of floats: 128 inputs of most matrices, and 96 of one that 8 devices share in parts of 12."""
    path = write_file(directory, kind=GGMLQuantizationType.F32, is_tied=is_tied, has_biases=has_biases)
    config, checkpoint = open_checkpoint(path)
    return config, {name: checkpoint.read(name, slice(None)) for name in checkpoint.names()}


def errors_over(
    directory: Path, *, is_tied: bool, num_devices: int, quantizations: tuple[str, ...]
) -> dict[str, float]:
    """Return how far logits of codes are from those of their numbers, as a share of the largest one."""
    config, tensors = model(directory, is_tied=is_tied)
    errors = {}
    for quantization in quantizations:
        wanted = logits_of(weights_of(config, TreeCheckpoint(numbers_of(tensors, quantization))))
        quantized = QuantizedCheckpoint(TreeCheckpoint(tensors), quantization)
        found = logits_of(weights_of(config, quantized, num_devices))
        errors[quantization] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return errors


@pytest.mark.parametrize(
    ("is_tied", "platform"),
    [
        (True, "cpu"), (False, "gpu"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, "cpu"), (True, "gpu"))),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_numbers_that_codes_stand_for(
    tmp_path: Path, is_tied: bool, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head are codes too; int4 has scales of groups, the others a scale for each output.

    The arrays of a GPU, where codes of 4 bits lie by rows of Wᵀ, give the same on a CPU.
    """
    monkeypatch.setattr(Target, "platform", platform)
    abstract_weights.cache_clear()
    errors = errors_over(tmp_path, is_tied=is_tied, num_devices=1, quantizations=AT_LOAD)
    abstract_weights.cache_clear()
    assert max(errors.values()) < 1e-5, errors


def check_update(directory: Path, num_devices: int) -> None:
    """Check that arrays on several devices become the codes that loading makes."""
    config, tensors = model(directory, is_tied=False)
    quantized = QuantizedCheckpoint(TreeCheckpoint(tensors), "int4")
    loaded, mesh = weights_of(config, quantized, num_devices), device_mesh(jax.devices()[:num_devices])
    live = LiveWeights(abstract_weights(config, "float32", mesh, XLA_OPS, stored_formats(quantized)), mesh)
    programs = live.programs()
    on_devices = {name: jax.device_put(values, replicated(mesh)) for name, values in tensors.items()}
    made = live.weights(live.check(on_devices), lambda key: programs[key]().compile())
    for wanted, found in zip(jax.tree.leaves(loaded.state), jax.tree.leaves(made.state), strict=True):
        assert found.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    handle = open_model(
        EngineConfig(model=str(directory / "m.gguf"), params=on_devices, quantization="int4", skip_tokenizer_init=True)
    )
    assert handle.arrays is on_devices
    assert isinstance(handle.checkpoint, QuantizedCheckpoint)


OVER_MESHES = """
import json, sys
from pathlib import Path
from tests.models.weights.test_code_arrays import check_update, errors_over
errors = errors_over(Path(sys.argv[1]), is_tied=False, num_devices=8, quantizations=("int8", "int4"))
check_update(Path(sys.argv[1]), 8)
print(json.dumps(errors))
"""


def test_logits_over_several_devices_are_those_of_one(tmp_path: Path) -> None:
    """12 of 96 inputs are on each of 8 devices, so groups of 32 are cut to 4; heads and vocabulary are padded.

    Codes of fp8 lie as those of int8 do.
    """
    errors = json.loads(run_over_devices(8, OVER_MESHES, str(tmp_path)).splitlines()[-1])
    assert errors.keys() == {"int8", "int4"}
    assert max(errors.values()) < 1e-4, errors


def test_codes_are_the_nearest_for_the_scales_that_a_gpu_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds scales in bfloat16, which would be up to 0.03 codes away from those for scales in float16."""
    config, tensors = model(tmp_path, is_tied=False)
    monkeypatch.setattr(Target, "platform", "gpu")
    abstract_weights.cache_clear()
    quantized = QuantizedCheckpoint(TreeCheckpoint(tensors), "int4")
    loaded, mesh = weights_of(config, quantized, dtype="bfloat16"), device_mesh(jax.devices()[:1])
    live = LiveWeights(abstract_weights(config, "bfloat16", mesh, XLA_OPS, stored_formats(quantized)), mesh)
    abstract_weights.cache_clear()
    wanted, programs = tensors["model.layers.0.mlp.down_proj.weight"], live.programs()
    for weights in (loaded, live.weights(live.check(tensors), lambda key: programs[key]().compile())):
        module = weights.state["layers"][0]["mlp"]["down_proj"]
        assert module["scales"].dtype == jnp.bfloat16
        arrays = module["weight"].get_metadata()["held"].arrays
        codes, scales = (np.asarray(arrays.rows_of(module[name][...]), np.float32) for name in ("weight", "scales"))
        divided = wanted / scales.repeat(32, axis=1)
        assert np.abs(np.clip(divided, -8, 7) - codes).max() < 0.5001


@pytest.mark.parametrize("quantization", AT_LOAD)
def test_arrays_of_a_trainer_become_the_codes_that_loading_makes(tmp_path: Path, quantization: str) -> None:
    config, tensors = model(tmp_path, is_tied=False)
    loaded = weights_of(config, QuantizedCheckpoint(TreeCheckpoint(tensors), quantization))
    formats = stored_formats(QuantizedCheckpoint(TreeCheckpoint(tensors), quantization))
    mesh = device_mesh(jax.devices()[:1])
    live = LiveWeights(abstract_weights(config, "float32", mesh, XLA_OPS, formats), mesh)
    programs = live.programs()
    own = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(loaded.state)}
    num_modules = len({name.rpartition(".")[0] for name in own})
    for tree, num_calls in ((tensors, num_modules), (own, len(own))):
        keys = list[Any]()
        made = live.weights(live.check(tree), lambda key, keys=keys: keys.append(key) or programs[key]().compile())
        assert len(keys) == num_calls, "codes and scales of a matrix are made together"
        for (path, wanted), found in zip(nnx.to_flat_state(loaded.state), jax.tree.leaves(made.state), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted[...]), err_msg=str(path))
    name = "layers.0.mlp.down_proj.weight"
    wanted_dtype = {"int8": "int8", "fp8": "float8_e4m3fn", "int4": FOUR_BITS}[quantization]
    with pytest.raises(ModelLoadError, match=f"{name} is float32, wanted {wanted_dtype}"):
        live.check(own | {name: np.zeros(own[name].shape, np.float32)})


def test_a_saved_checkpoint_holds_the_decoded_values_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    config, tensors = model(tmp_path, is_tied=True, has_biases=True)
    for quantization in ("fp8", "int4"):
        weights = weights_of(config, QuantizedCheckpoint(TreeCheckpoint(tensors), quantization), dtype="bfloat16")
        save_checkpoint(weights, tmp_path / quantization, format="safetensors")
        saved = load_file(tmp_path / quantization / "model.safetensors")
        assert saved.keys() == tensors.keys()
        for name, values in numbers_of(tensors, quantization).items():
            np.testing.assert_array_equal(saved[name], values.astype(jnp.bfloat16), err_msg=name)


def test_a_table_of_positions_stays_floats() -> None:
    raw = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_layer": 1,
        "n_head": 2, "n_positions": 64, "torch_dtype": "float32",
    }  # fmt: skip
    config, mesh = config_from_hf(raw, Path("config.json")), device_mesh(jax.devices()[:1])
    formats = formats_at_load("int8", tensor_shapes(config, mesh))
    state = dict(nnx.to_flat_state(abstract_weights(config, "float32", mesh, XLA_OPS, formats).state))
    assert (state["positions", "weight"].dtype, state["embed", "weight"].dtype) == (jnp.float32, jnp.int8)


def test_random_weights_are_quantized_and_take_as_many_bytes_as_said(tmp_path: Path) -> None:
    config, _ = model(tmp_path, is_tied=False)
    mesh, logits, sizes = device_mesh(jax.devices()[:1]), [], []
    for quantization in (None, "int8", "int4"):
        formats = formats_at_load(quantization, tensor_shapes(config, mesh)) if quantization else ()
        weights = dummy_weights(abstract_weights(config, "float32", mesh, XLA_OPS, formats))
        logits.append(logits_of(weights))
        sizes.append(weights.chip_bytes)
    # Older versions of JAX have 8 bits for each of 4.
    num_numbers = 2 * 70 * 128 + 2 * (3 * 96 * 128 + 2 * 128 * 128 + 2 * 64 * 128)
    num_outputs = 2 * 70 + 2 * (2 * 96 + 3 * 128 + 2 * 64)
    norms = 4 * 5 * 128
    assert sizes == [
        4 * num_numbers + norms,
        num_numbers + 4 * num_outputs + norms,
        num_numbers // (2 if FOUR_BITS == "int4" else 1) + 2 * num_numbers // 32 + norms,
    ]
    assert 0 < np.abs(logits[1] - logits[0]).max() < 0.05 * np.abs(logits[0]).max()
    assert 0 < np.abs(logits[2] - logits[0]).max() < 0.6 * np.abs(logits[0]).max()


def test_an_engine_on_the_backend_xla_keeps_codes_and_takes_new_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_file(tmp_path, kind=GGMLQuantizationType.F32)
    _, checkpoint = open_checkpoint(path)
    tensors = {name: checkpoint.read(name, slice(None)) for name in checkpoint.names()}

    def drawn(engine: Engine) -> list[Any]:
        outputs = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=6, logprobs=3))
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    options: dict[str, Any] = ENGINE | {"attention_backend": "xla", "quantization": "int8"}
    with caplog.at_level("INFO", "jpaged"), Engine(str(path), **options) as engine:
        wanted = drawn(engine)
        engine.sleep(level=2)
        engine.wake_up()
        assert drawn(engine) == wanted
        engine.update_params({name: values / 2 for name, values in tensors.items()})
        assert drawn(engine) != wanted
        engine.update_params(tensors)
        assert drawn(engine) == wanted
    assert "are kept as codes of int8" in caplog.text


FORMATS = {
    "Q8_0": CODE_FORMATS["Q8_0"],
    "Q5_0": CODE_FORMATS["Q5_0"],
    "MXFP4": CODE_FORMATS["MXFP4"],
    "with zeros": CodeFormat("AWQ", 4, 64, has_zeros=True),
    "a float8 and a scale for 128": float8_format(128),
    "int8": int8_format(256),
}


@pytest.mark.parametrize("share", [256, 40], ids=["whole", "cut"])
@pytest.mark.parametrize("by_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_and_columns_are_those_of_decoded_numbers(name: str, by_rows: bool, share: int) -> None:
    """Groups of 40 inputs on a device are cut to 8."""
    code_format, num_out = FORMATS[name], 24
    rng = np.random.default_rng(0)
    codes = random_codes(code_format, num_out, 256, rng)
    wanted = decode(codes, code_format)
    piece = Piece("w", ((0, num_out), (0, 256)), ((0, num_out), (0, 256)))
    held = held_codes([piece], {"w": (num_out, 256)}, {"w": code_format}, share, target(), is_table=by_rows)
    assert held is not None
    assert held.arrays.group == (None if code_format.group == 256 else math.gcd(share, code_format.group))
    arrays = held.arrays
    out = (
        np.empty(arrays.codes_shape(256, num_out), jnp.dtype(arrays.dtype)),
        np.empty(arrays.scales_shape(256, num_out), jnp.dtype(arrays.scale_dtype)),
    )

    class OneTensor:
        path = Path("m")

        def shape(self, name: str) -> tuple[int, int]:
            return num_out, 256

        def read_codes(self, name: str, rows: slice) -> Any:
            return replace(
                codes,
                codes=codes.codes[rows],
                scales=[each[rows] for each in codes.scales],
                zeros=None if codes.zeros is None else codes.zeros[rows],
            )

    read_held(OneTensor(), [piece], held, out, 10 * 256)
    matrix = ScaledMatrix(jnp.asarray(out[0]), jnp.asarray(out[1]), by_rows, "float32")
    ids = np.array([3, 0, 23])
    np.testing.assert_array_equal(scaled_columns(matrix, ids), wanted[ids])
    x = rng.normal(size=(5, 256)).astype(np.float32)
    found = np.asarray(scaled_product(jnp.asarray(x), matrix))
    np.testing.assert_allclose(found, x @ wanted.T, atol=1e-5 * np.abs(x @ wanted.T).max())


@pytest.mark.parametrize("name", [*MODELS, "GGUF"])
def test_quantized_checkpoints_give_the_logits_of_their_numbers(tmp_path: Path, name: str) -> None:
    """Of AWQ, codes with zeros taken away are kept in 8 bits; 8 bits with zeros become floats, and so does Q5_1."""
    path = write_file(tmp_path) if name == "GGUF" else write_model(tmp_path, name)
    config, checkpoint = open_checkpoint(path)
    kept = weights_of(config, checkpoint)
    mesh = device_mesh(jax.devices()[:1])
    floats = load_weights(abstract_weights(config, "float32", mesh, XLA_OPS), config, checkpoint)
    logits, wanted = logits_of(kept), logits_of(floats)
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(kept.state)}
    codes = {
        "awq": {"int8"},
        "int4": {FOUR_BITS},
        "int8 with zeros": set(),
        "fp8": {"float8_e4m3fn"},
        "GGUF": {FOUR_BITS, "int8"},
    }
    assert dtypes & {"int4", "int8", "float8_e4m3fn"} == codes[name]


def target(dtype: str = "float32") -> Target:
    return Target(device_mesh(jax.devices()[:1]), dtype, is_tied=False)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q6_K"])
def test_formats_with_minima_or_super_scales_become_floats(name: str) -> None:
    piece = Piece("w", ((0, 8), (0, 256)), ((0, 8), (0, 256)))
    assert held_codes([piece], {"w": (8, 256)}, {"w": CODE_FORMATS[name]}, 256, target(), is_table=False) is None


def test_parts_of_4_and_8_bits_are_kept_in_8_and_floats_and_integers_are_not_kept_together() -> None:
    whole = (0, 64)
    pieces = [Piece(name, ((0, 8), whole), ((8 * i, 8 * i + 8), whole)) for i, name in enumerate("ab")]
    shapes = {"a": (8, 64), "b": (8, 64)}

    def held(other: CodeFormat) -> Any:
        return held_codes(pieces, shapes, {"a": CODE_FORMATS["Q4_0"], "b": other}, 64, target(), is_table=False)

    assert held(CODE_FORMATS["Q8_0"]).arrays.dtype == "int8"
    assert held(int8_format(64)).arrays.scale_dtype == "float32"
    assert held(float8_format(64)) is None


def test_what_a_compiler_would_convert_first_becomes_floats_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a TPU it is a tied table with scales of groups."""
    config, tensors = model(tmp_path, is_tied=True)
    notes = {}
    for quantization in AT_LOAD:
        formats = stored_formats(QuantizedCheckpoint(TreeCheckpoint(tensors), quantization))
        abstract_weights.cache_clear()
        monkeypatch.setattr(Target, "platform", "tpu")
        state = abstract_weights(config, "bfloat16", device_mesh(jax.devices()[:1]), XLA_OPS, formats).state
        notes[quantization] = codes_note(state, formats) or ""
        assert (state["embed"]["weight"].dtype == jnp.bfloat16) is (quantization == "int4")
    abstract_weights.cache_clear()
    assert "a TPU's compiler makes a tied table" in notes.pop("int4")
    assert all("compiler" not in note for note in notes.values())


def test_bytes_of_4_bits_are_counted_by_halves() -> None:
    assert num_bytes((3, 10), jnp.dtype(jnp.int4)) == 15
    assert num_bytes((3, 10), jnp.dtype(jnp.bfloat16)) == 60


def test_the_log_names_what_is_kept_and_what_becomes_floats(tmp_path: Path) -> None:
    config, checkpoint = open_checkpoint(write_file(tmp_path))
    formats = stored_formats(checkpoint)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), XLA_OPS, formats)
    note = codes_note(abstract.state, formats)
    assert note is not None
    assert "kept as codes of Q8_0, Q4_0, Q5_0," in note
    assert "as floats" in note
    assert "codes of Q5_0 are held as int8, 8 bits each and not 5" in note


@pytest.mark.parametrize(("name", "kind"), [("awq", "AWQ-4/32"), ("int4", "int4/32")])
def test_the_log_says_that_codes_of_4_bits_are_held_in_8(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with zeros always are, others before JAX 0.11."""
    config, checkpoint = open_checkpoint(write_model(tmp_path, name))
    clauses = []
    for dtype in ("int4", "int8"):
        monkeypatch.setattr(code_arrays, "FOUR_BITS", dtype)
        abstract_weights.cache_clear()
        formats = stored_formats(checkpoint)
        abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), XLA_OPS, formats)
        clauses.append((codes_note(abstract.state, formats) or "").split("; ")[1:])
    abstract_weights.cache_clear()
    held = f"codes of {kind} are held as int8, 8 bits each and not 4"
    assert clauses == [[held] if name == "awq" else [], [held]]
