"""One engine over several devices draws what it draws on one: virtual devices of a CPU, in processes of their own.

Of the golden models some have heads that do not divide the devices: 2 KV heads on 8, or 1; OLMo norms all heads
together, and Gemma's windows and heads of keys repeat. The reference is the same engine on one device.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from jpaged import ConfigError, Engine
from jpaged.models.families.table import family_class
from jpaged.models.opening.open_checkpoint import read_config
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.recipe import make_recipes
from jpaged.models.weights.loading import abstract_weights
from jpaged.sharding import device_mesh

from .. import quick_compile

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "families"
SLOW = (
    "three_kv_heads", "four_kv_heads", "eight_kv_heads", "olmo2", "gemma3", "llama", "llama_tied", "llama_bias",
    "llama_gelu_heads", "mistral_window", "qwen2", "qwen2_layer_types_tied", "olmo3", "gemma2", "gpt2", "gpt_neox",
    "phi3_partial", "smollm3", "granite", "qwen3_head_dim",
)  # fmt: skip
"""Models that the slow tests spread over all numbers of devices, with all buckets."""
HEADS = {"three_kv_heads": (9, 3), "four_kv_heads": (12, 4), "eight_kv_heads": (8, 8)}


def process(*arguments: str, num_devices: int = 8, num_threads: int = 16, given: str = "") -> str:
    """Run Python with virtual devices, so many threads of XLA and an input, and return what it prints."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**quick_compile.environment(flags), "NPROC": str(num_threads)}
    command = [sys.executable, *arguments]
    result = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def run(directory: Path, buckets: str, kv_cache_dtype: str, *sizes: int | str) -> list[dict[str, Any]]:
    """Return what engines over so many devices drew with these buckets and pages.

    An e stands for whole experts on each, and a t for weights that are stored as on TPUs.
    """
    arguments = "-m", "tests.jpaged.mesh_engine", str(directory), buckets, kv_cache_dtype, *map(str, sizes)
    return [json.loads(line) for line in process(*arguments).splitlines()]


def random_model(directory: Path, num_heads: int, num_kv_heads: int, num_layers: int = 2) -> Path:
    """Make a model with so many heads, and biases, whose MLP and vocabulary do not divide 2 or 8 devices."""
    source = json.loads((GOLDEN / "llama_bias" / "config.json").read_text())
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": 8}
    sizes["num_hidden_layers"] = num_layers
    content = {**source, **sizes, "intermediate_size": 81, "vocab_size": 97, "dtype": "float32"}
    return save_random(directory, content)


def random_mixtral(directory: Path) -> Path:
    """Make a model of 5 experts of 21 columns: neither divides 2 or 8 devices."""
    source = json.loads((GOLDEN / "mistral_full" / "config.json").read_text())
    sizes = {"num_hidden_layers": 2, "intermediate_size": 21, "num_local_experts": 5, "vocab_size": 97}
    kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "float32"}
    return save_random(directory, {**source, **sizes, **kind})


def save_random(directory: Path, content: dict[str, Any]) -> Path:
    """Write a model of this config.json with random weights, with tokens and a tokenizer of 97 characters."""
    config = config_from_hf(content, Path("config.json"))
    state = abstract_weights(config, "float32", device_mesh(jax.devices()[:1])).state
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in make_recipes(state, family_class(config.architecture).sources(config)).shapes.items():
        drawn = rng.normal(0, 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3, shape)
        tensors[name] = (1 + drawn if "norm" in name else drawn).astype(np.float32)
    tensors["model.embed_tokens.weight"] *= 5
    (directory / "config.json").write_text(json.dumps(content))
    save_file(tensors, directory / "model.safetensors")
    save_file({"tokens": rng.integers(1, 97, 64)}, directory / "golden.safetensors")
    # Its vocabulary has the printable characters alone, so that structured outputs can be asked for.
    alphabet = ["<end>", "Ġ", *map(chr, range(33, 127))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


SAVES = """
import sys
from pathlib import Path

import jax

from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.saving import save_checkpoint
from jpaged.sharding import device_mesh
from jpaged.startup.model_source import resolve_model

for argument in sys.argv[1:]:
    if ":" not in argument:
        path = Path(argument)
        continue
    num_devices, format = argument.split(":")
    source = resolve_model(str(path))
    config, checkpoint = open_checkpoint(source.path, orbax=source.orbax)
    read, sizes = checkpoint.read, []

    def counted(*args):
        values = read(*args)
        sizes.append(values.size)
        return values

    checkpoint.read = counted
    mesh = device_mesh(jax.devices()[: int(num_devices)])
    weights = load_weights(abstract_weights(config, "float32", mesh), config, checkpoint)
    print(sum(sizes))
    path = path / "saved"
    save_checkpoint(weights, path, format=format)
"""
"""Loads a model over so many devices and saves it in a format, and what was saved again; prints the values read.

Arguments: a folder, then DEVICES:FORMAT…; then perhaps another folder, and so on.
"""


def assert_saved(directory: Path, saved: Path) -> dict[str, np.ndarray]:
    """Assert that a saved model has the tensors of the first one, and return these."""
    tensors, found = (load_file(path / "model.safetensors") for path in (directory, saved))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    return tensors


SAVED = (((9, 3), 8), ((9, 3), 2), ((8, 8), 8))
"""Heads, and devices that the model is loaded over."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, int]]:
    """Give the folder of each case of SAVED, with the model that was saved, and the number of values read."""
    folders = [random_model(tmp_path_factory.mktemp("saved"), *heads) for heads, _ in SAVED]
    arguments = [(str(folder), f"{size}:safetensors") for folder, (_, size) in zip(folders, SAVED, strict=True)]
    found = process("-c", SAVES, *sum(arguments, ())).splitlines()
    return {case: (folder, int(count)) for case, folder, count in zip(SAVED, folders, found, strict=True)}


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_a_model_is_read_once_over_several_devices_and_saved_without_what_pads(
    case: tuple[Any, int], saved: dict[Any, tuple[Path, int]]
) -> None:
    (directory, num_read), num_devices = saved[case], case[1]
    tensors = assert_saved(directory, directory / "saved")
    # What several devices have is read for each: norms, biases of the stream, and the KV heads of 3 on 8 devices.
    num_values = sum(tensor.size for tensor in tensors.values())
    on_all = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 1 and tensor.size == 64)
    of_kv_heads = sum(tensor.size for name, tensor in tensors.items() if "k_proj" in name or "v_proj" in name)
    num_copies = read_config(directory).shares(num_devices).kv_copies
    assert num_read <= 1.05 * num_values + (num_devices - 1) * on_all + (num_copies - 1) * of_kv_heads


def test_orbax_is_saved_from_any_mesh_and_restored_on_any_other(tmp_path: Path) -> None:
    """9 query heads and 3 KV heads are padded in another way on each; what comes back is the model's own."""
    directory = random_model(tmp_path, 9, 3)
    process("-c", SAVES, str(directory), "8:orbax", "2:orbax", "4:orbax", "1:safetensors")
    assert_saved(directory, directory.joinpath(*["saved"] * 4))


def test_more_devices_than_there_are_is_refused_before_weights_are_read() -> None:
    with pytest.raises(
        ConfigError, match=r"^tensor_parallel_size: got 1024, allowed: 1 to \d+, as many as this process"
    ):
        Engine(str(GOLDEN / "llama"), tensor_parallel_size=1024, skip_tokenizer_init=True)


REFUSED = """
import sys

from jpaged import ConfigError, Engine

for options in ({"tensor_parallel_size": 8}, {"tensor_parallel_size": 2, "attention_backend": "native"}):
    try:
        Engine(sys.argv[1], skip_tokenizer_init=True, **options)
    except ConfigError as error:
        print(error)
"""


def test_what_a_mesh_cannot_have_is_refused_by_name() -> None:
    """XLA:CPU would wait for ever with too few threads, and a kernel serves one device."""
    threads, kernel = process("-c", REFUSED, str(GOLDEN / "llama"), num_threads=9).splitlines()
    assert threads == (
        "tensor_parallel_size: got 8, allowed: at most half of XLA's 9 threads on a CPU, since devices that wait for a "
        "sum keep theirs; set NPROC=16 in the environment before JAX starts"
    )
    assert kernel == (
        "attention_backend: got native, which cannot serve here: it runs on one CPU device, and there are 2; use "
        "--attention-backend xla"
    )


MADE = {name: partial(random_model, num_heads=n, num_kv_heads=k) for name, (n, k) in HEADS.items()}
MADE |= {"mixtral": random_mixtral}
"""Models with random weights, by what makes one in a directory."""


@pytest.mark.parametrize(
    ("name", "sizes", "buckets", "kv_cache_dtype"),
    [
        ("three_kv_heads", (1, 8), "one_mode", "auto"),
        pytest.param(
            "mixtral", (1, 2, "2e", 8, "8e"), "make_buckets", "auto", id="mixtral-all", marks=pytest.mark.slow
        ),
        *(
            pytest.param(name, (1, 2, 4, 8), "make_buckets", "auto", id=f"{name}-all", marks=pytest.mark.slow)
            for name in SLOW
        ),
        *(
            pytest.param(name, (1, 2, "2e", 8, "8e"), "one_mode", "auto", id=f"{name}-all", marks=pytest.mark.slow)
            for name in ("gpt_oss", "qwen2_moe")
        ),
        pytest.param("gpt_oss", ("1t", "8t"), "one_mode", "auto", id="gpt_oss-weights of TPUs", marks=pytest.mark.slow),
        *(
            pytest.param("three_kv_heads", (1, 2, 8), "one_mode", dtype, id=f"pages-{dtype}", marks=pytest.mark.slow)
            for dtype in ("int8", "fp8")
        ),
    ],
)
def test_engines_over_several_devices_draw_the_same_tokens(
    name: str, sizes: tuple[int | str, ...], buckets: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    directory = GOLDEN / name
    if name in MADE:
        directory = MADE[name](tmp_path)
    whole, *spread = run(directory, buckets, kv_cache_dtype, *sizes)
    num_kv_heads = read_config(directory).num_kv_heads
    for size, found in zip(sizes[1:], spread, strict=True):
        num_devices = int(str(size).rstrip("et"))
        assert found.pop("first") == (6 if num_devices == 2 else 0), "the devices of the caller's mesh, or the first"
        assert found.pop("planned") == found["held"], "bytes of weights and of pages on a device"
        (weights, pages), (all_weights, all_pages) = found.pop("held"), whole["held"]
        assert weights < all_weights
        num_heads = read_config(directory).shares(num_devices).stored_kv_heads
        assert pages * num_devices * num_kv_heads == all_pages * num_heads
        assert found.pop("recompiles") == 0
        np.testing.assert_allclose(found.pop("logprobs"), whole["logprobs"], rtol=0, atol=1e-4)
        assert min(found["preemptions_swap"], found["preemptions_recompute"], found["hits"]) > 0
        assert found == {key: whole[key] for key in found}
    if name not in MADE:
        tokens = load_file(directory / "golden.safetensors")["tokens"].tolist()
        assert (whole["48"], whole["52"]) == ([tokens[48:]], [tokens[52:]])


@pytest.mark.slow
def test_trainers_meshes_serve_what_one_device_serves_and_give_their_weights_on_the_devices() -> None:
    """Four meshes, with automatic and explicit axes; the assertions are those of the process."""
    process("-m", "tests.jpaged.trainer_meshes", str(GOLDEN / "llama"), num_devices=4, num_threads=8)


REAL = """
import json
import sys

from jpaged import Engine, SamplingParams

golden = json.loads(sys.stdin.read())
prompts = [item["prompt_ids"] for item in golden["items"]]
params = SamplingParams(temperature=0, max_tokens=golden["max_new_tokens"], detokenize=False)
sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 512, "num_blocks": 513, "block_size": 16}
for num_devices in map(int, sys.argv[1:]):
    with Engine(tensor_parallel_size=num_devices, warmup="off", **sizes) as engine:
        for _ in range(2):  # Cold, in chunks of prompts, then with their prefixes cached.
            outputs = engine.generate(prompts, params, use_tqdm=False)
            print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
        stats = engine.stats()
        assert stats["recompiles"] == 0
        assert stats["prefix_cache_hits"] > 0
"""


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_smollm2_over_several_devices_draws_the_tokens_of_transformers() -> None:
    """9 query heads and 3 KV heads. At no position of the golden file is another token nearly as likely."""
    golden = json.loads((ROOT / "tests" / "golden" / "smollm2.json").read_text())
    found = process("-c", REAL, "2", "4", "8", given=json.dumps(golden)).splitlines()
    assert [json.loads(line) for line in found] == [[item["output_ids"] for item in golden["items"]]] * 6
