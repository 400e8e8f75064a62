#!/usr/bin/env bash
# ray 2.60.0: a call of map_batches that ends its actor is tried again without end; the only way out is deprecated.
#
# The documentation of actors says that `max_task_retries` is 0 by default. For the actors of Ray Data it is −1, without
# end, and `max_restarts` too: a Dataset with one row that ends its process never ends itself, whatever
# `max_errored_blocks` says. map_batches takes `max_task_retries` only among `**ray_remote_args`, which "is deprecated and
# will be removed in Ray 2.64. Use the named remote parameters instead", and no named parameter stands for it.
#
# Seen: without the argument the row was tried more than 5 times, and the program was still at it when it was stopped;
# with max_task_retries=1 twice, and the program ended, with a RayDeprecationWarning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "ray[data]==2.60.0"
cat > "$folder/row.py" <<'PY'
import inspect
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import ray

MANY = 5
tries = Path(sys.argv[1])
named = {} if sys.argv[2] == "default" else {"max_task_retries": 1}


class Work:
    def __call__(self, batch):
        with tries.open("a") as file:
            file.write("x")
        os._exit(1)  # As a machine would that goes away.


def num_tries():
    return len(tries.read_text()) if tries.exists() else 0


def end_if_many():
    while num_tries() <= MANY:
        time.sleep(0.2)
    print(f"default: tried {num_tries()} times, and stopped", flush=True)
    ray.shutdown()
    os._exit(0)


ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
context = ray.data.DataContext.get_current()
context.max_errored_blocks = -1
context.enable_progress_bars = context.print_on_execution_start = False
logging.getLogger("ray.data").setLevel(logging.CRITICAL)
assert "max_task_retries" not in inspect.signature(ray.data.Dataset.map_batches).parameters
if not named:
    threading.Thread(target=end_if_many, daemon=True).start()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    done = ray.data.from_items([1]).map_batches(Work, compute=ray.data.ActorPoolStrategy(size=1), **named)
rows = done.take_all()
assert named, "the row was not tried again and again"
deprecated = [str(one.message) for one in warned if "ray_remote_args" in str(one.message)]
print(f"max_task_retries=1: tried {num_tries()} times, {len(rows)} rows; {deprecated[0]}")
assert num_tries() == 2 and not rows and "removed in Ray 2.64" in deprecated[0]
PY
for way in default given; do
  RAY_USAGE_STATS_ENABLED=0 timeout 300 "$folder/venv/bin/python" "$folder/row.py" "$folder/tries-$way" "$way" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
done
echo "as described"
