"""A kernel that hangs, crashes or computes nonsense at its check costs a start no more than that kernel."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jpaged import Engine
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionShape
from jpaged.startup.attention import check_process
from jpaged.startup.attention.check import MAX_ERROR
from jpaged.startup.attention.check_process import CheckRequest, check_before_opening, check_in_subprocess

from ...tiny_model import write_tiny_model
from . import broken_kernels
from .test_attention_choice import model_with

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember results in a folder of the test, and forget those of this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_in_subprocess.cache_clear()


def request_of(backend: Any) -> CheckRequest:
    shape = AttentionShape(4, 2, 64, (None, 9), "float32")
    return CheckRequest.of(backend, device="cpu", shape=shape, dtype="float32", block_size=16, is_deterministic=False)


def test_a_request_arrives_as_it_was_sent() -> None:
    request = request_of(broken_kernels.Right)
    assert msgspec.json.decode(msgspec.json.encode(request), type=CheckRequest) == request


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        pytest.param(
            broken_kernels.Nan,
            f"it differs from numpy on cpu by inf of an output's norm, allowed: {MAX_ERROR}",
            marks=pytest.mark.slow,
        ),
        (broken_kernels.Crashes, "its check in a subprocess ended by SIGSEGV"),
    ],
    ids=["NaN", "crash"],
)
def test_a_failure_in_the_child_is_told_and_remembered_until_its_file_is_deleted(
    backend: Any, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (failure,) = {check_in_subprocess(request_of(backend)) for _ in range(2)}
    assert failure is not None
    (path,) = (tmp_path / "jpaged" / "checked").iterdir()
    assert failure == f"{wanted}; remembered in {path}, delete it to check again"
    check_in_subprocess.cache_clear()
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert check_in_subprocess(request_of(backend)) == failure


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        (broken_kernels.OutOfMemory, "it failed its check on cpu: RESOURCE_EXHAUSTED: Out of memory"),
        (broken_kernels.Killed, "its check in a subprocess ended by SIGKILL"),
    ],
    ids=["out of memory", "killed"],
)
def test_a_failure_that_may_be_over_at_the_next_start_is_not_remembered(
    backend: Any, wanted: str, tmp_path: Path
) -> None:
    failure = check_in_subprocess(request_of(backend))
    assert failure is not None
    assert failure.startswith(wanted)
    assert (check_process.LESS_MEMORY in failure) == (backend is broken_kernels.OutOfMemory)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "backend",
    [
        broken_kernels.Right,
        broken_kernels.Unavailable,
        pytest.param(broken_kernels.CrashesAtExit, marks=pytest.mark.slow),
    ],
)
def test_a_backend_that_agrees_or_is_not_for_this_device_has_no_failure(backend: Any) -> None:
    """Why a backend is not for a device, the start says by itself."""
    assert check_in_subprocess(request_of(backend)) is None


@pytest.mark.slow
def test_odd_folders_and_output_do_not_disturb_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `jax` in the current folder, a broken package, a Path in sys.path, bytes that are no text."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "jax.py").write_text("raise SystemExit('imported')")
    (tmp_path / "packages" / "broken.dist-info").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(ROOT), tmp_path / "packages"])
    assert check_in_subprocess(request_of(broken_kernels.Noisy)) is None


@pytest.mark.slow
def test_a_child_whose_parent_is_gone_ends_by_itself() -> None:
    request = msgspec.json.encode(request_of(broken_kernels.Hangs)).decode()
    command = [sys.executable, "-P", "-m", check_process.__name__, "4", str(os.getpid())]
    run = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True, timeout=60, env={
        **os.environ, "PYTHONPATH": str(ROOT)
    })  # fmt: skip
    assert run.returncode == -signal.SIGALRM
    assert check_process.DEVICE_IS_OPEN in run.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end the children of a process")
def test_a_child_dies_at_once_with_the_process_that_checks(tmp_path: Path) -> None:
    """Else it would keep a GPU's memory until its time is over."""
    script = (
        "from tests.jpaged.startup.attention.test_check_process import broken_kernels, request_of\n"
        "from jpaged.startup.attention.check_process import check_in_subprocess\n"
        "check_in_subprocess(request_of(broken_kernels.Hangs))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not (child := children.read_text().strip()):
        time.sleep(0.05)
    while b"check_process" not in Path(f"/proc/{child}/cmdline").read_bytes():
        time.sleep(0.05)
    time.sleep(5)  # It has come to `main`.
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + 5
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_kernel_that_hangs_is_ended_in_time_in_a_child_and_in_the_process_that_makes_the_check() -> None:
    """A process that makes the check itself, as on a TPU, says which option leads around it. Both hang at once."""
    script = (
        "import jax\n"
        "from jpaged.startup.attention import check\n"
        "from tests.jpaged.startup.attention.test_attention_choice import MODEL\n"
        "from tests.jpaged.startup.attention.broken_kernels import Hangs\n"
        "check.WATCHDOG_S = 3.0\n"
        "device = jax.devices('cpu')[0]\n"
        "check.find_failure(Hangs(), MODEL, 'float32', 'float32', 16, device)\n"
    )
    start = time.monotonic()
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    failure = check_in_subprocess(request_of(broken_kernels.Hangs), 8.0)
    assert failure is not None
    assert failure.startswith("its check in a subprocess gave no answer within 8 s; remembered in ")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    message = "error: attention: the check of pallas-gpu has given no answer within 3 s; use --attention-backend xla"
    message += ', or Engine(attention_backend="xla")'
    assert errors.splitlines()[-1] == message
    assert time.monotonic() - start < 60


def test_a_start_asks_before_the_gpu_is_opened_only_where_a_gpu_may_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CheckRequest] = []
    monkeypatch.setattr(check_process, "check_in_subprocess", asked.append)
    monkeypatch.setattr(check_process, "load_backend", lambda entry: broken_kernels.Right)
    monkeypatch.setattr(check_process, "visible_accelerators", lambda: ["gpu"])
    monkeypatch.setattr(check_process, "_jax_may_use_gpus", lambda: True)
    monkeypatch.setattr(check_process.jax, "__version_info__", (0, 11, 0))
    model = model_with(dtype="bfloat16")
    check_before_opening(EngineConfig(device="cpu"), model)
    check_before_opening(EngineConfig(attention_backend="xla"), model)
    assert asked == []
    check_before_opening(EngineConfig(block_size=32), model)
    (request,) = asked
    assert (request.device, request.dtype, request.block_size) == ("gpu", "bfloat16", 32)
    monkeypatch.setattr(check_process, "visible_accelerators", list)
    check_before_opening(EngineConfig(), model)
    assert len(asked) == 1


def test_a_default_that_fails_in_its_child_is_replaced_and_one_asked_for_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole engine, whose default backend on this CPU crashes when it is checked."""
    tiny, sizes = str(write_tiny_model(tmp_path / "tiny")), {"max_num_seqs": 2, "max_model_len": 64, "warmup": "off"}
    monkeypatch.setattr("jpaged.startup.attention.choice.load_backend", lambda entry: {
        "native": broken_kernels.Crashes,
        "xla": broken_kernels.XlaBackend,
    }[entry.name])  # fmt: skip
    with caplog.at_level(logging.WARNING, "jpaged"), Engine(tiny, **sizes, device="cpu") as engine:
        assert engine.backend.name == "xla"
        (message,) = (record.getMessage() for record in caplog.records if "attention: " in record.getMessage())
        assert message.startswith("attention: xla, not pallas-gpu: its check in a subprocess ended by SIGSEGV")
        assert engine.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match=r"cannot serve here: .* ended by SIGSEGV.* use --attention-backend xla"):
        Engine(tiny, **sizes, device="cpu", attention_backend="native")
