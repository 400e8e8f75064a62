"""An engine serves the same model from any format, and bad files end its start within seconds, in one line."""

import shutil
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from jpaged import ConfigError, Engine, InvalidRequestError, ModelLoadError, SamplingParams
from jpaged.models.formats.files import write_manifest
from jpaged.models.weights.saving import save_checkpoint

from ..gguf_file import convert_to_gguf
from .tiny_model import CONFIG, SIZES, tensors, write_tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "The capital of France"
NORM = "model.norm.weight"
MAX_S = 5.0


def tokens(model, **options):
    with Engine(model, **SIZES, **options) as engine:
        return engine.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def wanted(model):
    return tokens(model)


def without_weights(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder / path.name)
    return folder


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_what_an_engine_has_loaded_is_saved_and_served_again(tmp_path, model, wanted, format):
    with Engine(model, **SIZES) as engine:
        save_checkpoint(engine.runner.weights, tmp_path / "saved", format=format, manifest=True)
    assert tokens(tmp_path / "saved", load_format=format, tokenizer=model) == wanted


def test_the_newest_step_of_a_training_run_is_served(tmp_path, model, wanted):
    """As orbax's CheckpointManager saves a training state; config.json and tokenizer lie beside the steps."""
    folder, options = without_weights(model, tmp_path / "run"), orbax.checkpoint.CheckpointManagerOptions(max_to_keep=2)
    zeros = {name: np.zeros_like(values) for name, values in tensors().items()}
    with orbax.checkpoint.CheckpointManager(folder, options=options) as manager:
        for step, params in ((9, zeros), (10, tensors())):
            state = {"params": params, "opt_state": {"mu": zeros}, "step": np.int32(step)}
            manager.save(step, args=orbax.checkpoint.args.StandardSave(state))
    assert tokens(folder) == wanted


def test_params_replace_the_files_and_are_not_kept(tmp_path, model, wanted):
    folder = without_weights(model, tmp_path / "model")
    params = {name: jnp.asarray(values) for name, values in tensors().items()}
    with Engine(folder, params=params, **SIZES) as engine:
        assert engine.config.params is None
        assert engine.handle.checkpoint is None
        for array in params.values():
            array.delete()  # As a trainer does, which donates them.
        assert engine.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == wanted


def test_another_tokenizer_serves_in_place_of_the_models_own(tmp_path, model, wanted):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, folder)
    assert tokens(folder, tokenizer=model) == wanted
    with pytest.raises(
        ModelLoadError, match=r"tokenizer.*model': the directory has no tokenizer, wanted one of tokenizer\."
    ):
        Engine(model, tokenizer=folder)
    with pytest.raises(ModelLoadError, match="tokenizer 'nowhere': no such file or directory"):
        Engine(model, tokenizer="nowhere")


def test_without_a_tokenizer_requests_give_ids_and_want_no_text(model, wanted):
    with Engine(model, skip_tokenizer_init=True, **SIZES) as engine:
        assert engine.tokenizer is None
        for prompt, params in (
            (PROMPT, SamplingParams(detokenize=False)),
            ([5], SamplingParams(stop=["a"])),
        ):
            with pytest.raises(
                InvalidRequestError, match=r"since the engine has no tokenizer; .* --tokenizer DIR"
            ) as caught:
                engine.generate([prompt], params, use_tqdm=False)
            assert "\n" not in str(caught.value)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        ids = [byte for byte in range(5, 9)]
        output = engine.generate([ids], params, use_tqdm=False)[0].outputs[0]
        assert (output.text, len(output.token_ids)) == ("", len(wanted))


def test_every_end_of_a_gguf_file_ends_a_request(tmp_path):
    """The file names `<|im_end|>`; the other end is known by its text."""
    vocabulary = ["<|im_end|>", "<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": vocabulary, "merges": ["a b"], "eos_token_id": 0}
    values |= {"tokens": [*vocabulary[:-1], "ab"], "token_type": [3, 3, *[1] * 256]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    path = convert_to_gguf(tmp_path / "m.gguf", CONFIG, tensors(), metadata=metadata)
    with Engine(path, **SIZES) as engine:
        assert engine.handle.ends == "0 (<|im_end|>), 1 (<|endoftext|>)"
        assert engine.stats()["end_tokens"] == 2

        def ended(end, **options):
            params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={end: 100.0}, **options)
            return engine.generate(["x"], params, use_tqdm=False)[0].outputs[0]

        for end in (0, 1):
            assert (ended(end).token_ids, ended(end).finish_reason, ended(end).text) == ((end,), "stop", "")
            assert ended(end, ignore_eos=True).token_ids == (end,) * 6
            kept = ended(end, min_tokens=3)
            assert (len(kept.token_ids), kept.token_ids[3:], kept.finish_reason) == (4, (end,), "stop")
            assert not {0, 1} & set(kept.token_ids[:3])


def changed(change):
    made = tensors()
    change(made)
    return made


TENSORS = {
    "missing": (lambda t: t.pop(NORM), f"tensor {NORM} is missing (1 of 21 are)"),
    "left over": (lambda t: t.update({"lm_head.bias": np.zeros(258, np.float32)}), "tensor lm_head.bias has no place"),
    "another shape": (
        lambda t: t.update({NORM: np.zeros(63, np.float32)}),
        f"tensor {NORM} has shape (63,), the config",
    ),
}


def write_safetensors(folder, made):
    save_file(made, folder / "model.safetensors")


def write_orbax(folder, made):
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "tree", made)


def refused(error, message, *args, **options):
    """Assert that an engine does not start, within MAX_S and with one line."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        Engine(*args, **SIZES, **options)
    assert time.monotonic() - start < MAX_S
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("write", [write_safetensors, write_orbax, None], ids=["safetensors", "orbax", "params"])
def test_tensors_that_do_not_fit_end_the_start_in_every_format(tmp_path, model, write, change, message):
    folder, made = without_weights(model, tmp_path / "model"), changed(change)
    if write is None:
        refused(ModelLoadError, f"params: {message}", folder, params=made)
    else:
        write(folder, made)
        refused(ModelLoadError, message, folder)


def test_bad_files_and_options_end_the_start(tmp_path, model):
    refused(
        ModelLoadError,
        "hf_overrides: unknown key 'rope_thet' of this Llama",
        model,
        hf_overrides={"rope_thet": 5},
    )
    refused(ModelLoadError, "params: tensor lm_head.weight is missing", model, params={"a": "b"})
    refused(ConfigError, "load_format: got 'gguf', allowed: auto or safetensors", model, load_format="gguf")
    folder = write_tiny_model(tmp_path / "hqq", quantization_config={"quant_method": "hqq", "bits": 4})
    refused(ModelLoadError, "quant_method is 'hqq', wanted one of fp8, compressed-tensors", folder)
    write_orbax(tmp_path / "tree", tensors())
    refused(ModelLoadError, "has no config.json inside or up to two levels above it: put", tmp_path / "tree")
    folder = shutil.copytree(model, tmp_path / "listed")
    lines = [f"{'0' * 64}  {path.name}" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("\n".join(lines))
    refused(ModelLoadError, "config.json: its SHA-256 sum begins with", folder)


def test_tensors_are_checked_before_the_sums_of_their_files_and_these_before_they_are_loaded(tmp_path, model):
    folder = without_weights(model, tmp_path / "model")
    write_safetensors(folder, changed(lambda t: t.pop(NORM)))
    write_manifest(folder)
    write_safetensors(folder, changed(lambda t: t.update({NORM: np.full(64, np.nan, np.float32)})))
    refused(ModelLoadError, "model.safetensors: its SHA-256 sum begins with", folder)
    write_safetensors(folder, changed(lambda t: t.update({NORM: np.zeros(63, np.float32)})))
    refused(ModelLoadError, f"tensor {NORM} has shape (63,)", folder)
