"""A file of prompts, and its results."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..tiny_model import SIZE_FLAGS
from .command_line import BAD_LINE, NUM_LINES, generate


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 64 lines of every form; one of them has no valid temperature."""
    lines: list[dict[str, Any]] = []
    for index in range(NUM_LINES):
        text = f"Line {index} " + "says something " * (index % 3)
        forms: list[dict[str, Any]] = [
            {"prompt": text},
            {"messages": [{"role": "user", "content": text}], "id": f"chat-{index}"},
            {"prompt_token_ids": list(range(10, 30 + index // 2)), "temperature": 0.0},
            {"prompt": text, "seed": index, "top_k": 20, "id": f"seeded-{index}"},
        ]
        lines.append({**forms[index % 4], "max_tokens": 5 + index, "ignore_eos": True})
    lines[BAD_LINE]["temperature"] = -1
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def unbroken(tiny: str, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompt_file, "-o", path)
    assert run.returncode == 3, run.stderr
    assert run.stdout == ""
    assert "recompiles 0" in run.stderr
    return path
