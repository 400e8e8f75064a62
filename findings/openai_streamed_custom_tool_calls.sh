#!/usr/bin/env bash
# openai 3.57.0: the helper `chat.completions.stream` has no form for calls of custom tools.
#
# Chat completions take tools of the type "custom", and a complete message's call has the field `custom` with `name` and
# `input` (ChatCompletionMessageCustomToolCall). The type of a streamed call (ChoiceDeltaToolCall) has only `function`, so
# a delta's `custom` stays a dictionary. Iterating over `create(stream=True)` gives it; the final completion of the helper
# reads `tool_call.custom.name`, which a dictionary does not have.
#
# Seen: `create` gives ['patch', ''] and then 'text'; `stream` ends in AttributeError: 'dict' object has no attribute
# 'name', whether the request offers the tool or not.
# Programs that stream custom tools iterate over chunks; servers can do nothing about it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check openai==3.57.0
"$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

CALL = {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "patch", "input": ""}}
DELTAS = [
    ({"role": "assistant", "content": None}, None),
    ({"tool_calls": [CALL]}, None),
    ({"tool_calls": [{"index": 0, "custom": {"input": "text"}}]}, None),
    ({}, "tool_calls"),
]


class Streaming(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for delta, reason in DELTAS:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Streaming)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
asked = {"model": "m", "messages": [{"role": "user", "content": "Patch it."}]}
chunks = client.chat.completions.create(**asked, stream=True)
calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
pieces = [call.custom for call in calls]
print("openai", openai.__version__, "create:", pieces)
assert pieces == [{"name": "patch", "input": ""}, {"input": "text"}], pieces
for tools in ([], [{"type": "custom", "custom": {"name": "patch"}}]):
    with client.chat.completions.stream(**asked, tools=tools or openai.omit) as stream:
        try:
            stream.get_final_completion()
        except AttributeError as error:
            print("stream:", type(error).__name__, error)
            assert "no attribute 'name'" in str(error)
        else:
            raise SystemExit("the helper reads streamed calls of custom tools now")
PY
