"""A check script whose items go wrong in every way, for test_check_run.py."""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
from device_checks import run
from device_checks.items import Goal, Item, Part, Skipped
from jax._src import xla_bridge
from jax.extend.backend import clear_backends

main = run.main

GOALS = {"ratio": Goal("≤", 1.0, "measured"), "theirs": Goal("≤", 1.0, "measured", is_own=False)}


def end_process():
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # The signal goes to the main thread.


def fail_as_a_device():
    raise jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access was encountered")


def lose_the_device():
    jax.clear_caches()
    clear_backends()
    jax.config.update("jax_platforms", "none")
    fail_as_a_device()


def lack_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def skip():
    raise Skipped("5 bytes are missing")


def cases(session):
    """Return cases of which one ends the process while others run beside it."""
    right = {f"case {i}": Part(lambda: time.sleep(0.05) or 0.001, 0.01) for i in range(4)}
    return {**right, "crash in threads": Part(end_process, 0.01)}


OPENED: list[bool] = []


def note_whether_opened():
    OPENED.append(xla_bridge.backends_are_initialized())


def one(name, run, **options):
    return Item(name, 0.01, f"does {name}", lambda session: {name: Part(run)}, **options)


ITEMS = [
    Item("cases", 0.01, "cases in threads", cases, in_threads=True),
    one("first", lambda: {"pid": os.getpid()}),
    one("measured", lambda: {"ratio": 0.5, "theirs": None}),
    one("crash", end_process),
    one("device", fail_as_a_device),
    one("lost", lose_the_device),
    one("memory", lack_memory),
    one("hang", threading.Event().wait, part_limit_s=0.3),
    one("skip", skip),
    one("variable", lambda: {"variable": os.environ.get("TOY")}, environment={"TOY": "set"}),
    one("ahead", lambda: {"opened": OPENED}, environment={}, before_opening=note_whether_opened),
    one("slow", lambda: time.sleep(30)),
    one("last", lambda: {"pid": os.getpid()}),
]


def session_of(args: argparse.Namespace) -> None:
    """Return nothing, or refuse this machine."""
    if os.environ.get("TOY_FAULT"):
        raise SystemExit("toy_check: the driver is 1.0, wanted 2.0")
    if os.environ.get("TOY_BROKEN") == "crashes":
        end_process()
    if os.environ.get("TOY_BROKEN") == "hangs":
        time.sleep(60)


if __name__ == "__main__":
    run.OPEN_LIMIT_S = float(os.environ.get("TOY_OPEN_LIMIT_S", run.OPEN_LIMIT_S))
    sys.exit(main(__file__, "A toy.", ITEMS, GOALS, session_of))
