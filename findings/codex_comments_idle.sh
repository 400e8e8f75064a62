#!/usr/bin/env bash
# Codex 0.169.0 (@openai/codex): comments of a stream do not count against its idle timeout.
#
# Servers break the silence before a first token by lines that begin with a colon, which the standard of server-sent
# events recommends for this; proxies and OpenAI's own packages take them. Codex gives up a stream in which no event with
# data has come for `stream_idle_timeout_ms` (300,000 by default), however many comments have. An event of a type that it
# does not know, with data, is ignored and resets its clock.
#
# Seen, with a timeout of 1 s and 3 s until the answer: comments every 0.3 s end in "idle timeout waiting for SSE" and exit
# status 1; events {"type": "keepalive"} end in the answer and 0.
# A server that may be silent for long sends Codex events in place of comments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @openai/codex@0.169.0
python3 - "$folder" <<'PY'
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder = Path(sys.argv[1])
SILENCES = {
    "comments": (": waiting\n\n", 1, "idle timeout waiting for SSE"),
    "events": ('event: keepalive\ndata: {"type": "keepalive"}\n\n', 0, "Hello there."),
}
silence = ""
PART = {"type": "output_text", "text": "Hello there.", "annotations": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [PART]}
RESPONSE = {"id": "resp_1", "object": "response", "output": []}


class Slow(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.tell({"type": "response.created", "response": RESPONSE})
            for _ in range(10):
                time.sleep(0.3)
                self.wfile.write(silence.encode())
                self.wfile.flush()
            self.tell({"type": "response.output_item.done", "output_index": 0, "item": MESSAGE})
            self.tell({"type": "response.completed", "response": {**RESPONSE, "output": [MESSAGE]}})
        except OSError:
            pass  # Codex has left.
        self.close_connection = True

    def tell(self, event):
        self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
threading.Thread(target=server.serve_forever, daemon=True).start()
(folder / "config.toml").write_text(f"""
model = "m"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:{server.server_port}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 1000
stream_max_retries = 0
""")
command = [str(folder / "node_modules" / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--json", "Say hello."]
variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "CODEX_HOME": str(folder), "TERM": "dumb"}
for name, (silence, status, text) in SILENCES.items():
    ran = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    last = [line for line in lines if line["type"] in ("item.completed", "error")][-1]
    print(f"{name}: exit {ran.returncode}, {json.dumps(last)}")
    assert ran.returncode == status and text in json.dumps(last), f"wanted {status} and {text!r}"
PY
echo "as described"
