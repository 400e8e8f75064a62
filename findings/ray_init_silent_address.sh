#!/usr/bin/env bash
# ray 2.60.0: `ray.init` of an address where nothing listens gives up after 14 minutes, and takes no timeout.
#
# The connection is refused at once, and one would think that the error follows. ray.init makes 20 tries, of 41 s each: two
# waits of 5 s for a connection, one of 30 s for an answer, a pause. No argument changes that. The number of tries is in
# the environment variable RAY_NUM_REDIS_GET_RETRIES, though no Redis is there, and Ray reads it when it is imported:
# os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "1" after `import ray` does nothing. The same holds for RAY_AUTH_MODE and the
# token.
#
# Seen: a ConnectionError after 821 s; with the variable set to 1 before the import after 41 s; with it set after the
# import ray.init was still at it when it was stopped after 100 s.
# What wants to tell a wrong address soon asks it by itself first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ray==2.60.0
cat > "$folder/init.py" <<'PY'
import logging
import os
import socket
import sys

if sys.argv[1] == "before":
    os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "1"
import ray

if sys.argv[1] == "after":
    os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "1"
with socket.create_server(("127.0.0.1", 0)) as listener:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
print("tries", flush=True)
try:
    ray.init(address=address, logging_level=logging.CRITICAL)
except ConnectionError:
    print("gave up", flush=True)
PY
run() { # $1: when the variable is set; $2: seconds after which the program is stopped
  said=$(RAY_USAGE_STATS_ENABLED=0 timeout -s KILL "$2" "$folder/venv/bin/python" "$folder/init.py" "$1" 2> "$folder/log" | tr '\n' ' ' || true)
  echo "$1, $2 s: $said"
}
run before 90
[ "$said" = "tries gave up " ]
run after 100
[ "$said" = "tries " ]
echo "as described"
