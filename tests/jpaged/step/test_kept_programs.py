"""Step programs that a start keeps: the next start traces nothing and computes the same."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.startup import build_engine
from jpaged.step import programs

PROMPTS = [[5, 6, 7], [8, 9]]
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=1.0, seed=1, max_tokens=5, logprobs=3),
    SamplingParams(temperature=1.0, seed=2, max_tokens=5, top_p=0.7, presence_penalty=0.5, logprobs=0),
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let engines keep their programs in a directory of its own."""
    monkeypatch.setattr(build_engine, "compilation_cache", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Fail tests that trace a step."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    with monkeypatch.context() as patch:
        for name in ("forward", "sample_rows", "decode"):
            patch.setattr(programs, name, fail)
        yield patch


def start(model: str, *, max_num_seqs: int = 4) -> Engine:
    config = EngineConfig(model=model, max_num_seqs=max_num_seqs, num_blocks=64)
    return Engine.from_engine_args(config, keeps_programs=True)


def results(engine: Engine) -> list[object]:
    with engine:
        return [
            (sample.token_ids, sample.logprobs, sample.cumulative_logprob)
            for kind in KINDS
            for output in engine.generate(PROMPTS, kind, use_tqdm=False)
            for sample in output.outputs
        ]


def test_a_later_start_traces_nothing_and_computes_the_same(
    tiny: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    first = results(start(tiny))
    assert len(first) == len(KINDS) * len(PROMPTS)
    request.getfixturevalue("nothing_is_traced")
    assert results(start(tiny)) == first


def test_an_engine_of_other_sizes_traces_its_own(tiny: str, directory: Path) -> None:
    first = results(start(tiny))
    assert results(start(tiny, max_num_seqs=2)) == first


@pytest.mark.parametrize("fault", ["cut", "changed", "empty"])
def test_a_torn_file_is_traced_again(tiny: str, directory: Path, fault: str) -> None:
    first = results(start(tiny))
    kept = {file: file.read_bytes() for file in directory.iterdir()}
    for file, content in kept.items():
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"cut": content[:middle], "changed": changed, "empty": b""}[fault])
    assert results(start(tiny)) == first
    assert {file.name for file in directory.iterdir()} == {file.name for file in kept}
    assert all(len(file.read_bytes()) == len(content) for file, content in kept.items())


def test_a_directory_that_refuses_files_costs_nothing_but_time(
    tiny: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = results(start(tiny))
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    with caplog.at_level(logging.ERROR):
        assert results(start(tiny)) == first
    assert not caplog.records


def test_engines_of_other_processes_than_commands_keep_nothing(tiny: str, directory: Path) -> None:
    results(Engine(tiny, max_num_seqs=4, num_blocks=64))
    assert not list(directory.iterdir())
