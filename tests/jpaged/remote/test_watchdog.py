"""A core that hangs is noticed, says where, and goes on or is killed; one that works or waits is left alone."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jpaged import SamplingParams
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import EngineStoppedError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.remote.core_client import CoreClient, WatchOptions
from jpaged.remote.core_process import STARTING
from jpaged.remote.thread_client import ThreadClient
from jpaged.remote.watchdog import STDERR, Watchdog, sign_of_life
from jpaged.text.grammar.grammar import Grammars

from .conftest import OPTIONS, StartProcess
from .core_makers import held

LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
LIMIT_S = 60.0
SOON = WatchOptions(step_s=2.5)
"""More than a heartbeat takes."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def look(clock: Clock) -> Callable[..., str]:
    """Give a function that looks after some seconds, and notes how often stacks were printed as `printed`."""

    def look(sign: Any, after_s: float = 1.0) -> str:
        clock.now_s += after_s
        return watchdog.look(sign, LIMIT_S, "a step")

    def print_stacks() -> None:
        look.printed += 1  # type: ignore[attr-defined]

    look.printed = 0  # type: ignore[attr-defined]
    watchdog = Watchdog(print_stacks, clock)
    return look


def test_the_same_sign_for_too_long_is_told_once_in_the_log(look: Any, caplog: pytest.LogCaptureFixture):
    assert [look(1) for _ in range(60)] == [""] * 60
    assert look(1) == "a step makes no progress since 60 s"
    assert look(1) == "a step makes no progress since 61 s"
    assert look.printed == 1
    assert [record.message for record in caplog.records] == [
        "a step makes no progress since 60 s; the stacks of all threads follow"
    ]


def test_what_goes_on_again_is_told_and_may_hang_again(look: Any, caplog: pytest.LogCaptureFixture):
    for _ in range(100):
        look(1)
    assert look(2) == ""
    assert caplog.records[-1].message == "a step goes on after 99 s"
    assert [look(2) for _ in range(59)] == [""] * 59
    assert look(2) == "a step makes no progress since 60 s"
    assert look.printed == 2


def test_signs_that_change_are_never_told(look: Any):
    assert {look(number // 50) for number in range(1000)} == {""}


def test_time_in_which_nobody_looked_does_not_count(look: Any):
    look(1)
    assert look(1, after_s=3600.0) == "", "the machine slept, or this process was stopped itself"
    assert [look(1) for _ in range(57)] == [""] * 57
    assert look(1) == "a step makes no progress since 60 s"


def test_work_must_come_further_and_a_core_without_any_must_send_heartbeats():
    busy = msgspec.structs.replace(STARTING, has_work=True, is_compiling=False, num_steps=5)
    assert sign_of_life(busy, 1) == sign_of_life(busy, 2)
    assert sign_of_life(busy, 1) != sign_of_life(msgspec.structs.replace(busy, num_steps=6), 1)
    compiling = msgspec.structs.replace(STARTING, has_work=False, is_compiling=True, num_programs_done=1)
    assert sign_of_life(compiling, 1) == sign_of_life(compiling, 2)
    assert sign_of_life(compiling, 1) != sign_of_life(msgspec.structs.replace(compiling, num_programs_done=2), 1)
    idle = msgspec.structs.replace(STARTING, has_work=False, is_compiling=False)
    assert sign_of_life(idle, 1) != sign_of_life(idle, 2)
    assert (WatchOptions().limit_s(busy), WatchOptions().limit_s(compiling)) == (60.0, 600.0)


@contextmanager
def stderr_in(folder: Path) -> Iterator[Path]:
    """Let this process, and children that it starts, write into a file what goes to stderr; yield its path."""
    path, kept = folder / "stderr", os.dup(STDERR)
    with path.open("ab") as file:
        os.dup2(file.fileno(), STDERR)
    try:
        yield path
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


@pytest.fixture(params=["thread", "process"])
def hanging(
    request: pytest.FixtureRequest,
    tiny: str,
    start_process: StartProcess,
    tmp_path: Path,
    shared_executables: None,
) -> Iterator[CoreClient]:
    """Give a client whose engine computes no step while there is a file `step` in the test's folder."""
    if request.param == "process":
        with stderr_in(tmp_path):
            client: CoreClient = start_process("held", options={"folder": str(tmp_path)})
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Grammars, "matcher", Grammars.matcher)  # `held` changes it for this process.
            client = ThreadClient(held(EngineConfig(model=tiny, **OPTIONS), None, folder=str(tmp_path)))
    yield client
    (tmp_path / "step").unlink(missing_ok=True)
    client.shutdown()


def until_printed(stderr: Path, text: str) -> None:
    """Wait until stderr has a text: a core process prints its stacks a moment after the signal."""
    end_s = time.monotonic() + 20
    while text not in stderr.read_text():
        assert time.monotonic() < end_s, stderr.read_text()
        time.sleep(0.05)


async def watched(client: CoreClient, options: WatchOptions, is_wanted: Callable[[str], bool]) -> str:
    """Watch a core until it tells what is wanted."""
    end_s = time.monotonic() + 60
    while not is_wanted(stall := client.watch(options)):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
    return stall


def test_a_step_that_hangs_is_told_with_its_stack_and_goes_on(
    hanging: CoreClient, builder: RequestBuilder, tmp_path: Path
):
    async def run() -> None:
        stream = await hanging.submit([builder.build("", "Hi", LONG, number=0)], takes_deltas=True)
        (tmp_path / "step").touch()
        assert await watched(hanging, SOON, bool) == "a step makes no progress since 2 s"
        (tmp_path / "step").unlink()
        await watched(hanging, SOON, lambda stall: not stall)
        while not (outputs := await stream.take()) or not outputs.outputs:
            continue
        assert len(outputs.outputs[0].outputs[0].token_ids) == LONG.max_tokens

    with stderr_in(tmp_path) as stderr:
        asyncio.run(run())
    until_printed(stderr, "in slow_advance")


def test_a_core_under_a_held_lock_prints_its_stacks_and_is_killed(
    start_process: StartProcess, builder: RequestBuilder, tmp_path: Path
):
    with stderr_in(tmp_path) as stderr:
        client = start_process("holds_the_lock_in_steps")
    options = WatchOptions(step_s=2.5, ends_core=True)

    async def run() -> None:
        while client.status().is_compiling:
            await asyncio.sleep(0.05)
        submit = client.submit([builder.build("", "Hi", LONG, number=0)], takes_deltas=True)
        with pytest.raises(EngineStoppedError, match=r"^the core process was killed, since a step makes no progress"):
            await asyncio.gather(submit, watched(client, options, lambda _: bool(client.lost_process)))

    asyncio.run(run())
    assert client.lost_process.startswith("the core process was killed, since a step makes no progress since ")
    until_printed(stderr, "in holding_advance")


@pytest.mark.parametrize(
    ("maker", "options", "ends_core"), [("sleeps", {}, True), ("starts_late", {"seconds": 4.0}, False)]
)
def test_a_start_that_hangs_is_told_and_may_be_ended(
    start_process: StartProcess,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    maker: str,
    options: dict[str, Any],
    ends_core: bool,
):
    killed = pytest.raises(EngineStoppedError, match="killed, since the start of the core process makes no progress")
    with stderr_in(tmp_path) as stderr, killed if ends_core else nullcontext():
        start_process(maker, options=options, watch=WatchOptions(start_s=2.0, ends_core=ends_core))
    until_printed(stderr, f"in {maker}")
    assert caplog.records[0].levelno == logging.ERROR
    assert "the start of the core process makes no progress since" in caplog.records[0].message
