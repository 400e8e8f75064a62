#!/usr/bin/env bash
# anthropic 2.14.0: client.beta.messages.tool_runner asks the server to store the conversation, and goes on without that
# only if the error says so in `error.details.error_code`.
#
# One would think that the loop of tools sends messages.create requests as a program would: it sends the field
# `thread: {"type": "create"}` too, and in the next turn `thread: {"type": "continue", "previous_message_id": …}` with new
# messages alone. A server that ignores the field gets a turn without its conversation; one that refuses it by an
# ordinary 400 ends the loop in a BadRequestError. With details {"error_code": "thread_unsupported_request"} the loop sends
# the turn again without the field, and whole conversations from then on. `thread=False` asks for none from the start.
#
# Seen: an ordinary 400: BadRequestError after threads ['create']; with details: ended after threads ['create', None,
# None]; ignored: the second request has 1 message, thread continue.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check anthropic==2.14.0
env -u http_proxy -u https_proxy -u all_proxy -u HTTP_PROXY -u HTTPS_PROXY -u ALL_PROXY "$folder/venv/bin/python" - <<'PY'
import http.server
import json
import threading

import anthropic

way, bodies = "", []
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        refuses = "thread" in body and way != "ignored"
        if refuses:
            details = {"details": {"error_code": "thread_unsupported_request"}} if way == "with details" else {}
            error = {"type": "invalid_request_error", "message": "thread: not available", **details}
            reply = {"type": "error", "error": error}
        else:
            is_first = sum("thread" not in one or way == "ignored" for one in bodies) == 1
            reply = {
                "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None,
                "content": [USE] if is_first else [{"type": "text", "text": "Sun."}],
                "stop_reason": "tool_use" if is_first else "end_turn",
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        data = json.dumps(reply).encode()
        self.send_response(400 if refuses else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@anthropic.beta_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)


def run(new_way):
    """Return how the loop ends, and the requests that it has sent, for a server that does this with `thread`."""
    global way
    way = new_way
    bodies.clear()
    try:
        messages = [{"role": "user", "content": "Oslo?"}]
        for _ in client.beta.messages.tool_runner(model="m", max_tokens=9, tools=[weather], messages=messages):
            pass
        end = "ended"
    except anthropic.APIStatusError as error:
        end = type(error).__name__
    threads = [(one.get("thread") or {}).get("type") for one in bodies]
    print(f"{way}: {end} after threads {threads}, messages {[len(one['messages']) for one in bodies]}")
    return end, threads, [len(one["messages"]) for one in bodies]


assert run("an ordinary 400") == ("BadRequestError", ["create"], [1])
assert run("with details") == ("ended", ["create", None, None], [1, 1, 3])
assert run("ignored") == ("ended", ["create", "continue"], [1, 1])
PY
echo "as described"
