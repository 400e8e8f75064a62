"""`jpaged batch` gives the responses of our server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jpaged.serving.protocols.table import GENERATION_ROUTES

from ..commands.command_line import records
from ..commands.test_batch import CHAT, COMPLETION, batch, request, write
from ..tiny_model import CHAT_TEMPLATE, SIZE_FLAGS
from .served import Served

HELLO = [{"role": "user", "content": "hello"}]
LINES = [
    request("chat", CHAT, messages=HELLO, seed=3, n=2),
    request("completion", COMPLETION, prompt=["one", "two"], seed=3, echo=True),
    {
        **request("response", "/v1/responses"),
        "body": {"model": "tiny", "input": "hello", "max_output_tokens": 16, "seed": 3},
    },
    request("message", "/v1/messages", messages=HELLO, max_tokens=4, seed=3),
    request("bad message", "/v1/messages", messages=[], max_tokens=4),
    request("bad", COMPLETION, prompt="x", temperature=-1),
    request("too long", CHAT, messages=[{"role": "user", "content": "long " * 50}]),
]
OWN_FIELDS = (
    "id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "prompt_tokens_details",
    "input_tokens_details", "input_tokens", "cache_read_input_tokens",
)  # fmt: skip


def plain(value: Any) -> Any:
    """Return a body without the fields that differ between two runs."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in OWN_FIELDS}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.usefixtures("shared_executables", "few_buckets")
def test_a_batch_has_the_responses_of_the_server(served: Served, tiny: str, tmp_path: Path) -> None:
    prompts, path = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    run = batch("-m", tiny, *SIZE_FLAGS, "--served-model-name", "tiny", "-i", prompts, "-o", path)
    assert run.returncode == 3, run.stderr
    found = {one["custom_id"]: one["response"] for one in records(path) + records(tmp_path / "out.errors.jsonl")}
    assert {line["url"] for line in LINES} == GENERATION_ROUTES.keys()
    for line in LINES:
        status, _, body = served.request(line["url"], line["body"])
        response = found[line["custom_id"]]
        assert response["status_code"] == status
        assert json.dumps(plain(response["body"])) == json.dumps(plain(body))


NAMED = "{% for one in tools or [] %}{{ one.function.name }} {{ one.function.parameters }}\n{% endfor %}"
TOOLS_TEMPLATE = NAMED + '{% if 0 %}<tool_call>\n{"name": "…"}\n</tool_call>{% endif %}' + CHAT_TEMPLATE
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLS = [
    request("chat", CHAT, messages=HELLO, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required",
            n=2, max_tokens=60),
    {**request("response", "/v1/responses"), "body": {"input": "hello", "tools": [{"type": "function", **FUNCTION}],
                                                       "tool_choice": "required", "max_output_tokens": 60}},
    request("message", "/v1/messages", messages=HELLO, max_tokens=60, tool_choice={"type": "any"},
            tools=[{"name": "f", "input_schema": FUNCTION["parameters"]}]),
]  # fmt: skip


@pytest.mark.usefixtures("shared_executables", "few_buckets")
def test_a_second_run_writes_the_same_bytes_with_calls_too(tiny: str, tmp_path: Path) -> None:
    """Else a run that was killed and resumed would not."""
    template, prompts = tmp_path / "template", write(tmp_path / "in.jsonl", CALLS)
    template.write_text(TOOLS_TEMPLATE)
    written = []
    for name in ("first", "second"):
        args = ["-i", prompts, "-o", tmp_path / name, "--chat-template", template, "--max-model-len", 256]
        run = batch("-m", tiny, *SIZE_FLAGS, "--served-model-name", "tiny", *args)
        assert run.returncode == 0, run.stderr
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    ids = re.findall('"((?:call|toolu)_[0-9a-f]+)"', written[0])
    assert len(ids) == len(set(ids)) >= 4
