"""Step programs that a start keeps: the next start traces nothing and computes the same."""

import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
from gguf import GGMLQuantizationType

from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.models.weights.kept_shapes import kept_shapes
from jpaged.pallas_kernels.kept_files import Kept, read_kept, write_kept
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.startup import abstract_engine, prepared_engine
from jpaged.step import kept_programs, kv_measure, programs
from jpaged.step.kept_programs import KeptPrograms, Program

from ...models.weights.test_coded import kind_of, write_file
from ...quick_compile import environment

pytestmark = pytest.mark.usefixtures("few_buckets")

PROMPTS = [[5, 6, 7], [8, 9]]
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=1.0, seed=1, max_tokens=5, logprobs=3),
    SamplingParams(temperature=1.0, seed=2, max_tokens=5, top_p=0.7, presence_penalty=0.5, logprobs=0),
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let engines keep their programs in a directory of its own."""
    monkeypatch.setattr(prepared_engine, "compilation_cache", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def first_start(
    tiny: str, few_buckets: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, list[object]]]:
    """Give a directory in which an engine has kept its programs, and what it computed for each index of KINDS."""
    path = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_engine, "compilation_cache", lambda: path)
        found = results(start(tiny), KINDS)
    size = len(PROMPTS)
    assert len(found) == len(KINDS) * size
    return path, {kind: found[kind * size : (kind + 1) * size] for kind in range(len(KINDS))}


@pytest.fixture
def first(first_start: tuple[Path, dict[int, list[object]]], directory: Path) -> dict[int, list[object]]:
    """Fill the directory with what the first start has kept, and give what it computed."""
    shutil.copytree(first_start[0], directory, dirs_exist_ok=True)
    return first_start[1]


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Fail tests that trace a step."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    with monkeypatch.context() as patch:
        for name in ("forward", "sample_rows", "decode"):
            patch.setattr(programs, name, fail)
        patch.setattr(kv_measure, "merged_model", fail)
        yield patch


def start(model: str | Path, *, max_num_seqs: int = 4, **options: Any) -> Engine:
    config = EngineConfig(model=model, max_num_seqs=max_num_seqs, num_blocks=64, warmup="off", **options)
    return Engine.from_engine_args(config, keeps_programs=True)


def results(engine: Engine, kinds: Sequence[SamplingParams] = KINDS[:1]) -> list[object]:
    with engine:
        return [
            (sample.token_ids, sample.logprobs, sample.cumulative_logprob)
            for kind in kinds
            for output in engine.generate(PROMPTS, kind, use_tqdm=False)
            for sample in output.outputs
        ]


def test_a_later_start_traces_nothing_and_computes_the_same(
    tiny: str, first: dict[int, list[object]], nothing_is_traced: pytest.MonkeyPatch
) -> None:
    assert results(start(tiny), KINDS) == [result for of_kind in first.values() for result in of_kind]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_program_is_compiled_with_its_options(tmp_path: Path, is_kept: bool) -> None:
    state = jax.ShapeDtypeStruct((2,), jax.numpy.float32)
    program = Program("double", lambda state: 2 * state, (state,), {"xla_no_such": 1}, donated=0, has_rest=False)
    kept = KeptPrograms(tmp_path, NativeBackend(), jax.devices()[0], "")
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such'"):
        (kept.lower(program) if is_kept else program.lower()).compile()


def test_the_program_that_measures_scales_of_pages_is_kept(
    tiny: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    first = results(start(tiny, kv_cache_dtype="int8"))
    request.getfixturevalue("nothing_is_traced")
    assert results(start(tiny, kv_cache_dtype="int8")) == first


def test_an_engine_of_other_sizes_traces_its_own(
    tiny: str, first: dict[int, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert results(start(tiny, max_num_seqs=2)) == first[0]
    assert not [record for record in caplog.records if "cannot be used" in record.message]


def test_a_model_of_the_same_shapes_traces_its_own_and_an_engine_of_the_callers_own_process_keeps_nothing(
    tiny: str, first: dict[int, list[object]], directory: Path
) -> None:
    changes, scored, files = {"rms_norm_eps": 0.1, "rope_theta": 30.0}, KINDS[1:2], set(directory.iterdir())
    own = results(Engine(tiny, max_num_seqs=4, num_blocks=64, hf_overrides=changes), scored)
    assert own != first[1]
    assert set(directory.iterdir()) == files
    assert results(start(tiny, hf_overrides=changes), scored) == own
    assert set(directory.iterdir()) > files


def test_another_setting_processor_or_source_of_ours_traces_its_own(
    tiny: str, first: dict[int, list[object]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [len(list(directory.iterdir()))]

    def count() -> None:
        results(start(tiny))
        sizes.append(len(list(directory.iterdir())))

    with jax.default_matmul_precision("highest"):
        count()
    monkeypatch.setattr(NativeBackend, "hardware", classmethod(lambda cls, device: "a processor without AMX"))
    count()
    monkeypatch.setattr(kept_programs, "_SOURCES_HASH", "another")
    count()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")  # XLA has read it already; a later one would.
    count()
    assert all(later > earlier for earlier, later in pairwise(sizes)), sizes


def test_a_start_on_other_cores_traces_nothing_and_compiles_only_what_depends_on_them(
    tiny: str, directory: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """XLA cuts programs into as many modules as there are cores, and no more than 32."""
    found: list[tuple[object, set[str], set[str]]] = []
    for num_cores in 33, 64, 2:
        kept_shapes.cache_clear()  # As in a later process.
        monkeypatch.setattr(abstract_engine, "num_host_cores", lambda num_cores=num_cores: num_cores)
        computed = results(start(tiny))
        modules, executables = ({file.name for file in directory.glob(f"{kind}_*")} for kind in ("step", "executable"))
        found.append((computed, modules, executables))
        if num_cores == 33:
            request.getfixturevalue("nothing_is_traced")
    on_33, on_64, on_2 = found
    assert on_64 == on_33
    assert on_2[:2] == on_33[:2]
    assert on_2[2] > on_33[2]
    assert len(on_2[2]) == 2 * len(on_33[2])


def test_another_process_finds_them_and_native_code_that_is_gone_is_compiled_again(tiny: str, tmp_path: Path) -> None:
    """Names hold no address of an object, and programs name all native code that they call."""
    command = [sys.executable, "-m", "jpaged.generate", "--model", tiny, "--max-tokens", "3", "--temperature", "0"]
    command += ["--max-num-seqs", "4", "--warmup", "off"]
    cache = tmp_path / "xla"

    def run() -> tuple[str, set[str]]:
        cached = [*command, "--compilation-cache-dir", str(cache), "some text"]
        done = subprocess.run(cached, capture_output=True, text=True, check=True, env=environment())
        return done.stdout, {file.name for file in cache.glob("step_*")}

    first, names = run()
    assert len(names) >= 2
    for file in cache.glob("native_*"):
        file.unlink()
    assert run() == (first, names)
    assert list(cache.glob("native_*"))


@pytest.mark.parametrize("are_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_starts_at_once_find_an_empty_directory_and_leave_whole_files(
    tiny: str, directory: Path, are_processes: bool, request: pytest.FixtureRequest
) -> None:
    """Both compute the same, as does the next start, which traces nothing."""
    command = [sys.executable, "-m", "jpaged.generate", "--model", tiny, "--max-tokens", "3", "--warmup", "off"]
    command += ["--temperature", "0", "--max-num-seqs", "4", "--compilation-cache-dir", str(directory), "some text"]

    def run(_: int) -> object:
        if not are_processes:
            return results(start(tiny))
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout

    kept_shapes.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    files = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    kept = [name for name in files if name.startswith(("step_", "executable_"))]
    assert kept
    assert all(read_kept(directory / name) is not None for name in kept)
    assert not [name for name in files if name.endswith(".part")]
    if not are_processes:
        kept_shapes.cache_clear()
        request.getfixturevalue("nothing_is_traced")
    assert run(0) == first


@pytest.mark.parametrize("fault", [pytest.param("cut", marks=pytest.mark.slow), "changed"])
def test_a_torn_file_is_traced_again(tiny: str, directory: Path, fault: str) -> None:
    first = results(start(tiny))
    kept = {file: file.read_bytes() for file in directory.iterdir()}
    for file, content in kept.items():
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes(content[:middle] if fault == "cut" else changed)
    kept_shapes.cache_clear()  # As in a later process.
    assert results(start(tiny)) == first
    again = {file: file.read_bytes() for file in directory.iterdir()}
    assert again.keys() == kept.keys()
    for file, content in kept.items():
        if file.name.startswith("executable_"):  # XLA writes the same one in different bytes.
            assert read_kept(file) is not None
        else:
            assert again[file] == content


def test_an_executable_that_xla_refuses_is_compiled_again_and_a_warning_says_so(
    tiny: str, first: dict[int, list[object]], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in directory.glob("executable_*"):
        kept = read_kept(file)
        assert kept is not None
        write_kept(file, Kept(kept.header, kept.content[:100]))
    with caplog.at_level(logging.WARNING):
        assert results(start(tiny)) == first[0]
    refused = [record.message for record in caplog.records if "the kept program cannot be used" in record.message]
    assert refused
    assert not any("\n" in message for message in refused)
    kept_again = [read_kept(file) for file in directory.glob("executable_*")]
    assert sum(kept is not None and len(kept.content) > 100 for kept in kept_again) == len(refused)


def test_a_start_that_ended_before_xla_had_compiled_keeps_what_was_traced(
    tiny: str, first: dict[int, list[object]], directory: Path, nothing_is_traced: pytest.MonkeyPatch
) -> None:
    for file in directory.glob("executable_*"):
        file.unlink()
    assert results(start(tiny)) == first[0]
    assert list(directory.glob("executable_*"))


@pytest.mark.parametrize("fault", ["gone", "full"])
def test_a_directory_that_refuses_files_costs_a_warning_and_time(
    tiny: str,
    first: dict[int, list[object]],
    directory: Path,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit on the sizes of files stands for a full disk: what does not fit is not there, nor is a part of it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # CPython would leave torn bytecode of modules.
    shutil.rmtree(directory)
    kept_shapes.cache_clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "full":
        directory.mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert results(start(tiny)) == first[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    cause = "File too large" if fault == "full" else "No such file or directory"
    expected = f"{directory}: programs are not kept, each start compiles them anew: {cause}"
    assert [record.getMessage() for record in caplog.records] == [expected]
    kept = list(directory.iterdir()) if fault == "full" else []
    assert all(read_kept(file) is not None for file in kept)
    assert bool(kept) == (fault == "full"), "small files fit"


def test_files_of_equal_sizes_whose_matrices_are_stored_in_other_formats_share_no_programs(
    tmp_path: Path, directory: Path
) -> None:
    """Keys and values change places: the fused weights have as many bytes."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "weights_cache_dir": "off"}
    for name, part in ("first", "k_proj"), ("second", "v_proj"):

        def kind(tensor: str, part: str = part) -> GGMLQuantizationType:
            is_key_or_value = "k_proj" in tensor or "v_proj" in tensor
            named = GGMLQuantizationType.Q8_0 if part in tensor else GGMLQuantizationType.Q4_0
            return named if is_key_or_value else kind_of(tensor)

        (tmp_path / name).mkdir()
        path = write_file(tmp_path / name, kind=kind)
        assert results(start(path, **options)) == results(start(path, quantization="none", **options))
