"""`jpaged batch` gives the responses of our server."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.serving.protocols.table import GENERATION_ROUTES

from ..commands.command_line import records
from ..commands.test_batch import CHAT, COMPLETION, batch, request, write
from ..tiny_model import SIZE_FLAGS
from .served import Served

HELLO = [{"role": "user", "content": "hello"}]
LINES = [
    request("chat", CHAT, messages=HELLO, seed=3, n=2, logprobs=True, top_logprobs=2),
    request("completion", COMPLETION, prompt=["one", "two"], seed=3, echo=True, logprobs=1),
    {**request("response", "/v1/responses"), "body": {"model": "tiny", "input": "hello", "max_output_tokens": 16}},
    request("message", "/v1/messages", messages=HELLO, max_tokens=4),
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
    again = tmp_path / "again.jsonl"
    assert batch("-m", tiny, *SIZE_FLAGS, "--served-model-name", "tiny", "-i", prompts, "-o", again).returncode == 3
    assert again.read_bytes() == path.read_bytes()
