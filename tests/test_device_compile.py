"""The engine's programs, compiled for a CPU, and for TPUs and an H100 without such a chip."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import jax
import pytest

from jpaged.models.families.table import BY_ARCHITECTURE
from jpaged.pallas_kernels.ragged_paged_attention.page_moves import MAX_MOVES

pytestmark = pytest.mark.usefixtures("optimized")

ROOT = Path(__file__).parents[1]
NUM_PAGES = 1024
NUM_ROWS = 256
"""Rows of the sampler that compile_step.py compiles for chips."""
TARGETS = {  # Target → the name that JAX gives its devices, and the wheels that hold its compiler.
    "cpu": ("cpu", ()),
    "v5e": ("TPU v5 lite", ("libtpu",)),
    "v6e": ("TPU v6 lite", ("libtpu",)),
    "v7x": ("TPU7x", ("libtpu",)),
    "h100": ("NVIDIA H100 80GB HBM3", ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")),
}


def missing_wheels(names):
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            yield name


def output_of(script, target, num_devices, *args):
    """Return the JSON object that a script of this folder prints about programs for `num_devices` devices."""
    kind, wheels = TARGETS[target]
    if missing := list(missing_wheels(wheels)):
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[aot]'")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), target, str(num_devices), *args],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["kind"] == kind
    return found


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(chips, marks=pytest.mark.slow) for chips in (("cpu", 1), ("v6e", 4), ("h100", 4))),
        *(("v6e", 1), ("h100", 1)),
    ],
    ids=str,
)
def compiled(request):
    return output_of("compile_for_device.py", *request.param, str(NUM_PAGES))


@pytest.mark.parametrize("program", ["copy", "swap_in"])
def test_a_program_that_writes_pages_writes_them_into_the_cache_that_it_was_given(compiled, program):
    """All of the cache is aliased, and beside it the program needs at most one page, never a second cache."""
    found = compiled["programs"][program]
    assert found["aliased"] == NUM_PAGES * compiled["page_bytes"]
    assert found["temporary"] <= compiled["page_bytes"] + 2**20
    assert found["outputs"] - found["aliased"] < 4096
    assert found["collectives"] == 0


def test_a_swap_out_leaves_one_batch_of_pages_beside_the_cache(compiled):
    found, batch_bytes = compiled["programs"]["swap_out"], MAX_MOVES * compiled["page_bytes"]
    assert batch_bytes <= found["outputs"] < batch_bytes + 4096
    assert found["temporary"] < 2**20
    assert found["collectives"] == 0


def test_attention_in_plain_xla_writes_and_reads_the_cache_in_place(compiled):
    """All pages are aliased, and the memory needed beside them is less than a layer's keys: none are copied.

    It does not grow with the number of pages either; a TPU's program is compiled for one number, so that this is
    compared for a GPU and a CPU.
    """
    temporary = {}
    for name, found in compiled["programs"].items():
        if name.startswith("attention"):
            kind, num_pages = name.rsplit(", ", 1)
            num_pages = int(num_pages.split()[0])
            # Two of the model's 32 layers.
            assert found["aliased"] == num_pages * compiled["page_bytes"] // 16
            temporary.setdefault(kind, set()).add(found["temporary"])
    for kind, sizes in temporary.items():
        assert len(sizes) == 1, kind
        assert max(sizes) < NUM_PAGES * compiled["page_bytes"] // 16 // 4


@pytest.mark.parametrize("compiled", [("v6e", 1), ("h100", 1)], ids=str, indirect=True)
def test_the_loops_that_time_kernels_contain_no_further_copy(compiled):
    """Kernel times are compared with a copy's: a second copy in that loop would make attention look twice as fast, and
    a copy of the pages in attention's own loop would hide its cost."""
    assert set(compiled["loops"]) == {"copy", "decode"}
    for name, found in compiled["loops"].items():
        assert found["copies"] == [], name
        # A program that writes another buffer than it reads needs room for both.
        assert found["temporary"] < found["buffer"] // 2, name


STEPS = [  # Each takes long: 32 layers.
    pytest.param(("cpu", 1, "float32"), marks=pytest.mark.slow),
    *(
        pytest.param((*chip, "bfloat16"), marks=pytest.mark.slow)
        for chip in (("cpu", 1), ("v5e", 4), ("v6e", 1), ("v6e", 4), ("v7x", 1), ("v7x", 2), ("h100", 1), ("h100", 4))
    ),
]


@pytest.fixture(scope="module", params=STEPS, ids=str)
def steps(request):
    return output_of("compile_step.py", *map(str, request.param))


def test_a_whole_step_makes_nothing_as_large_as_a_layers_keys(steps):
    """A step with a prompt, a decode step and the loop of decode steps copy, convert and transpose no such array."""
    decodes = {"forward_decodes"} if steps["kind"] != "cpu" else set()
    assert {name.split()[0] for name in steps["steps"]} == {"forward", "decode", *decodes}
    for name, reports in steps["steps"].items():
        for found in reports:
            assert found["large"] == [], name


def test_a_whole_step_aliases_the_cache_and_needs_no_more_memory_beside_a_larger_one(steps):
    for name, reports in steps["steps"].items():
        for found in reports:
            # Page tables and last tokens are donated too.
            assert 0 <= found["aliased"] - found["cache"] - found["hidden"] < 2**20, name
            assert found["own"] <= steps["kept"], f"{name} takes more than the plan of memory keeps for it"
        few, many = reports
        assert many["pages"] == 2 * few["pages"]
        assert many["temporary"] <= few["temporary"], name


def test_two_layers_of_a_step_for_a_tpu_hold_the_cache_in_place_and_kernels_in_hbm():
    """Two layers of a model with 8e9 parameters: a step of decode rows launches one kernel a layer, others three."""
    steps = output_of("compile_step.py", "v6e", 1, "bfloat16", "2")["steps"]
    assert {name.split()[0]: found["kernels"] for name, (found,) in steps.items()} == {
        "forward_decodes": 2,
        "forward": 6,
    }
    for name, (found,) in steps.items():
        assert found["in_vmem"] == [], name
        assert found["large"] == [], name
        assert 0 <= found["aliased"] - found["cache"] - found["hidden"] < 2**20, name


def test_two_layers_of_a_step_for_a_gpu_hold_the_cache_in_place_and_ask_the_host_for_no_condition():
    """The attention of decode rows is two kernels a layer, the second one a merge; other steps have large tiles too."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need jax 0.11")
    steps = output_of("compile_step.py", "h100", 1, "bfloat16", "2")["steps"]
    kernels = {name.split()[0]: found["kernels"] for name, (found,) in steps.items()}
    assert kernels == {"forward_decodes": 4, "forward": 8, "decode": 4, "sample": 0}
    for name, (found,) in steps.items():
        assert (found["unknown_loops"], found["branches"]) == (0, 0), name
        assert found["misaligned"] == [], name
        if "sample" not in name:
            assert found["large"] == [], name
            assert 0 <= found["aliased"] - found["cache"] < 2**20 + found["hidden"], name


CODED = [
    (("h100", 1), "int4", "--decodes-only"),
    # A layer with a window.
    (("v6e", 1), "int8", "--config tests/public_configs/google__gemma-3-1b-it.json"),
    *(
        pytest.param(chip, quantization, None, marks=pytest.mark.slow)
        for chip in (("h100", 1), ("h100", 8), ("v6e", 1), ("v6e", 8))
        for quantization in ("int8", "fp8", "int4")
    ),
    pytest.param(("h100", 1), "Q8_0", "--tied", marks=pytest.mark.slow),
    pytest.param(("v6e", 1), "AWQ", None, marks=pytest.mark.slow),
    pytest.param(("h100", 1), "fp8_blocks", None, marks=pytest.mark.slow),
    pytest.param(("v6e", 1), "int8", "--tied", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("chip", "quantization", "option"), CODED, ids=str)
def test_codes_become_numbers_within_the_products_that_read_them(chip, quantization, option):
    """A layer of Llama-3 8B, of 70B on 8 devices, or of Gemma 3: nothing as large as a matrix is made of its codes in
    another dtype.

    Arguments take the bytes of codes and scales, as the plan of memory counts them. Collectives are those of a step of
    floats, and one for the scales of the embeddings.
    """
    options = "bfloat16", "1", "--pages", "100", "--quantization", quantization, *(option or "").split()
    steps = output_of("compile_step.py", *map(str, chip), *options)
    for name, (found,) in steps["steps"].items():
        assert found["converted"] == [], name
        assert found["large"] == [], name
        assert found["aliased"] >= found["cache"] or not name.startswith("forward"), name
        # Beside them a program takes a step's packed numbers.
        assert 0 <= found["arguments"] - found["true_bytes"] < 2**20, name
        assert found["own"] <= steps["kept"], name
        if steps["num_devices"] > 1 and not name.startswith("sample"):
            sums = found["collectives"]["all-reduce"]
            stream = max(sums)[0]
            # 32 values of a row share a scale. A TPU sums the codes of embeddings as words of 4 or 8 of them.
            streams = [
                (stream if size in (stream // 4, stream // 8) else size, dtype)
                for size, dtype in sums
                if 32 * size > stream
            ]
            assert len(sums) - len(streams) <= 1
            found["collectives"]["all-reduce"] = streams
    if steps["num_devices"] > 1:
        check_collectives(steps, 1)


@pytest.mark.slow
def test_a_cache_that_fills_a_gpu_does_not_make_xla_compute_values_again():
    """XLA counts the donated cache twice, and would save memory that is not short."""
    steps = output_of("compile_step.py", "h100", 1, "bfloat16", "2", "--pages", "100000")["steps"]
    assert {name: found["computed_again"] for name, (found,) in steps.items()} == dict.fromkeys(steps, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("google__gemma-3-1b-it", "v6e"),
        ("microsoft__Phi-3.5-mini-instruct", "v6e"),
        ("openai-community__gpt2", "h100"),
    ],
)
def test_two_layers_of_a_public_model_compile_for_a_chip(script, name, chip):
    """Two kinds of layers, LongRoPE, and LayerNorm, in a step with prompts; scripts/compile_families.py compiles all
    families, and their other programs."""
    families = script("compile_families")
    config = str(families.CONFIGS / f"{name}.json")
    found = output_of("compile_step.py", chip, "1", "bfloat16", "2", "--config", config, "--prompts-only")
    assert families.faults_of(found) == []
    assert found["backend"].startswith("pallas") or (chip == "h100" and jax.__version_info__ < (0, 11))


EXPERTS = [
    ("mistralai__Mixtral-8x7B-v0.1", 1), ("mistralai__Mixtral-8x7B-v0.1", 8), ("Qwen__Qwen3-30B-A3B", 1),
    ("Qwen__Qwen3-235B-A22B", 8), ("openai__gpt-oss-20b", 1), ("openai__gpt-oss-120b", 8),
]  # fmt: skip
"""Public models whose MLPs are experts, and the devices that they are spread over."""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "h100"])
@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [(*model, []) for model in EXPERTS] + [(*model, ["--expert-parallel"]) for model in EXPERTS if model[1] > 1],
    ids=str,
)
def test_a_layer_of_experts_holds_what_its_choices_need(name, num_devices, options, chip):
    """Nothing is as large as all experts, or as all experts' results of all tokens; sums over devices are two a layer.

    A GPU's host reads no condition of a loop. A TPU looks up all embeddings at once, and not in a loop over tokens.
    """
    config = ROOT / "tests" / "public_configs" / f"{name}.json"
    steps = output_of("compile_step.py", chip, num_devices, "bfloat16", "1", "--config", str(config), *options)
    for step, (found,) in steps["steps"].items():
        assert found["beyond_choices"] == [], step
        assert found["large"] == [], step
        assert found["own"] <= steps["kept"], step
        if chip == "h100":
            assert (found["unknown_loops"], found["branches"]) == (0, 0), step
        else:
            # The expert of each row is searched for where experts have biases.
            assert found["unknown_loops"] == int("gpt-oss" in name), step
    if num_devices > 1:
        check_collectives(steps, 1)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_a_prompt_of_experts_takes_what_is_kept_and_at_least_three_quarters_of_it(chip):
    """A step of the default size, whose rows of choices are most of what it takes."""
    config = ROOT / "tests" / "public_configs" / "mistralai__Mixtral-8x7B-v0.1.json"
    options = "bfloat16", "1", "--config", str(config), "--pages", "100", "--tokens", "8192"
    steps = output_of("compile_step.py", chip, 1, *options)
    (needed,) = [found["own"] for name, (found,) in steps["steps"].items() if name == "forward 8192"]
    assert 0.75 * steps["kept"] < needed < steps["kept"]


@pytest.mark.slow
@pytest.mark.parametrize("name", dict(EXPERTS))
def test_a_layer_of_experts_on_a_cpu_holds_what_its_choices_need(name):
    """Native code is one custom call of XLA: what it keeps between its phases has rows for choices, not for all
    experts, and each product reads the experts' panels as they are stored."""
    config = ROOT / "tests" / "public_configs" / f"{name}.json"
    steps = output_of("compile_step.py", "cpu", 1, "bfloat16", "1", "--config", str(config), "--pages", "128")
    for step, (found,) in steps["steps"].items():
        assert found["beyond_choices"] == [], step
        assert found["large"] == [], step
        assert found["own"] <= steps["kept"], step


@pytest.mark.slow
def test_a_step_for_a_tpu_copies_no_table_of_a_width_that_fills_no_whole_tiles(tmp_path):
    """A layer as wide as SmolLM2-360M's: its tied table has 960 columns, 7.5 tiles of 128."""
    content = json.loads((ROOT / "tests" / "public_configs" / "meta-llama__Llama-3.2-1B-Instruct.json").read_text())
    sizes = {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5}
    content["config"] |= {**sizes, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    steps = output_of("compile_step.py", "v6e", 1, "bfloat16", "1", "--config", str(tmp_path / "config.json"))["steps"]
    assert {name.split()[0] for name in steps} == {"forward_decodes", "forward", "sample"}
    for name, (found,) in steps.items():
        assert found["large"] == [], name
        assert found["unknown_loops"] == 0 or name.startswith("sample"), name
        assert 0 <= found["arguments"] - found["true_bytes"] < 2**20, name


@pytest.mark.slow
def test_attention_in_plain_xla_has_one_or_two_loops_a_layer_whose_length_a_gpus_host_reads():
    steps = output_of("compile_step.py", "h100", 1, "bfloat16", "2", "xla")["steps"]
    loops = {name.split()[0]: found["unknown_loops"] for name, (found,) in steps.items()}
    assert loops == {"forward_decodes": 2, "forward": 4, "decode": 2, "sample": 0}, "in two layers"
    assert all(found["branches"] == 0 for (found,) in steps.values())


def test_products_read_each_weight_once(steps):
    """The compiler counts at most 1.15 times the weights' bytes; on a GPU it does not count."""
    if "products" not in steps:
        pytest.skip("a GPU's compiler counts no bytes")
    accessed, weights = steps["products"]
    assert 1.0 <= accessed / weights <= 1.15


def test_a_sampler_keeps_its_rules_where_they_are(steps):
    """With masks, every rule and logprobs, the token counts and biases of all sequences are donated and not copied."""
    found = steps["sampler"]
    # A TPU pads the rows of tables.
    assert found["rules"] <= found["aliased"] < 1.05 * found["rules"] + 2**20
    assert found["large"] == []
    assert found["temporary"] <= steps["kept"], "the plan of memory keeps less for a program"


def check_collectives(steps, num_layers):
    """Two all-reduces a layer and one for the embedding; a gather of the logits in what draws; and no others."""
    for name, reports in steps["steps"].items():
        kind, size = name.split()[:2]
        streams, logits = int(size) * steps["hidden_size"], int(size) * steps["vocab_size"]
        gathers = {} if kind.startswith("forward") else {"all-gather": [logits]}
        reduces = {} if kind == "sample" else {"all-reduce": [streams] * (2 * num_layers + 1)}
        for found in reports:
            assert sizes_of(found["collectives"]) == reduces | gathers, name


def sizes_of(collectives):
    """Return the numbers that each collective returns, by its kind."""
    return {kind: [size for size, _ in results] for kind, results in collectives.items()}


def test_a_step_over_several_devices_reduces_twice_a_layer_and_gathers_logits(steps):
    if steps["num_devices"] == 1:
        assert all(not found["collectives"] for reports in steps["steps"].values() for found in reports)
    else:
        check_collectives(steps, 32)
        assert sizes_of(steps["sampler"]["collectives"]) == {"all-gather": [NUM_ROWS * steps["vocab_size"]]}


@pytest.mark.slow
def test_heads_that_do_not_divide_the_devices_need_no_other_collectives_and_no_copy_of_pages():
    """9 query heads and 3 KV heads on 8 virtual devices of a CPU, one stored KV head on each."""
    steps = output_of("compile_step.py", "cpu", 8, "float32", "1")
    check_collectives(steps, 1)
    for name, (few, many) in steps["steps"].items():
        assert few["large"] == many["large"] == [], name
        assert many["pages"] == 2 * few["pages"]
        assert many["temporary"] <= few["temporary"], name


@pytest.mark.slow
@pytest.mark.parametrize("cell", [("llama-70b", "v5e", 16), ("gemma-27b", "h100", 8)], ids=lambda cell: cell[0])
def test_bytes_and_collectives_over_a_mesh_are_those_of_the_formulas(script, cell):
    """Each KV head of the first is on two chips; scripts/mesh_costs.py compiles all cells."""
    if missing := list(missing_wheels(TARGETS[cell[1]][1])):
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[aot]'")
    assert script("mesh_costs").measure(*cell)["faults"] == []


def test_every_family_has_a_model_that_is_compiled(script):
    families = script("compile_families")
    contents = [json.loads((families.CONFIGS / f"{name}.json").read_text())["config"] for name in families.MODELS]
    assert {content["architectures"][0] for content in contents} == set(BY_ARCHITECTURE)


PRINTS_DEVICES = """
import sys
sys.path.insert(0, "scripts")
from compile_tpu import CHIPS, prepare
prepare()
import jax
from jax.experimental import topologies
from jpaged import EngineConfig
from jpaged.startup.devices import serving_devices
topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[sys.argv[1]])
jax.local_devices = lambda backend: topology.devices
print(len(serving_devices(EngineConfig())), len(serving_devices(EngineConfig(tensor_parallel_size=1))))
"""


@pytest.mark.parametrize(("chip", "num_devices"), [("v6e", 1), ("v7x", 2)])
def test_the_halves_of_a_tpu_7x_serve_one_engine_by_default(chip, num_devices):
    if missing := list(missing_wheels(TARGETS[chip][1])):
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[aot]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRINTS_DEVICES, chip]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert result.stdout.split() == [str(num_devices), "1"]
