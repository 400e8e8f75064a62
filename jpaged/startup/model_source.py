"""Finds the files of the model that the user names, and reads the sampling defaults that come with them.

A model is a directory, a GGUF file, `org/name[@revision]` of the Hugging Face hub, or the name of a built-in. The
models room opens what is found here. Imports neither jax nor transformers, so that a wrong name is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..checks import nearest, one_line
from ..errors import ModelLoadError
from ..models.io.fields import Fields, read_json_object
from .builtin_model import BUILTIN_MODELS, fetch_builtin

GGUF_MAGIC = b"GGUF"
WEIGHT_FILES = "*.safetensors"
HUB_FILES = ("*.json", WEIGHT_FILES, "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Files that are downloaded: weights, configs and tokenizers, and nothing that could be code or a pickle."""
EXCLUDED_HUB_FILES = ("*/*", "consolidated*")
"""Files that are not downloaded though HUB_FILES match: second copies of the weights in other formats."""

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is. `name` is what the user gave; `path` is a directory (safetensors) or a file (gguf)."""

    name: str
    kind: Literal["safetensors", "gguf"]
    path: Path
    default_sampling: Mapping[str, float | int] | None = None
    """Sampling defaults of a built-in model, whose file cannot carry them."""


def resolve_model(model: str, *, revision: str | None = None, with_weights: bool = True) -> ModelSource:
    """Find `model` and download it if necessary; a path that exists goes before a name of the hub.

    Without `with_weights`, no weights come from the hub. Raises ModelLoadError, one line with the way out, if there is
    no model of that name. Weights are not read.
    """
    if model in BUILTIN_MODELS:
        _refuse_revision(model, revision)
        builtin = BUILTIN_MODELS[model]
        sampling = {"temperature": builtin.temperature, "top_p": builtin.top_p}
        return ModelSource(model, "gguf", fetch_builtin(builtin), sampling)
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            _refuse_revision(model, revision)
            return _local_source(model, path)
        match = _HUB_NAME.fullmatch(model)
        if match is None:
            raise ModelLoadError(_unknown_model(model, path))
    # The name is too long, the folder may not be entered, or `~user` names no user.
    except (OSError, RuntimeError) as error:
        way_out = "check the path and its permissions"
        raise ModelLoadError(f"model {model!r}: cannot be read ({error}); {way_out}") from error
    if revision and match["revision"] and revision != match["revision"]:
        raise ModelLoadError(f"model {model!r}: the revision is given twice, as {revision!r} too: give one of them")
    return _local_source(model, _hub_snapshot(model, match["repo"], revision or match["revision"], with_weights))


def read_generation_defaults(source: ModelSource, *, only_eos: bool = False) -> dict[str, Any]:
    """Read the sampling defaults of the model's generation config; only the keys that it sets are returned.

    Keys: temperature, top_p, top_k, min_p, repetition_penalty, and eos_token_id as a list of ids that end a reply.
    `do_sample: false` becomes temperature 0. With `only_eos` only eos_token_id is read. Without a file the result is
    empty, or the model card's defaults of a built-in model. Raises ModelLoadError for a value of a wrong type.
    """
    path = source.path / "generation_config.json"
    if source.kind == "gguf" or not path.exists():
        return {} if only_eos else dict(source.default_sampling or {})
    fields = Fields(read_json_object(path), path)
    defaults: dict[str, Any] = {}
    if stop_ids := fields.token_ids("eos_token_id"):
        defaults["eos_token_id"] = list(stop_ids)
    if only_eos:
        return defaults
    readers: dict[str, Callable[[str], float]] = {
        "temperature": partial(fields.number, min=0),
        "top_p": partial(fields.number, above=0, max=1),
        "top_k": partial(fields.integer, min=-1),
        "min_p": partial(fields.number, min=0, max=1),
        "repetition_penalty": partial(fields.number, above=0),
    }
    defaults |= {name: read(name) for name, read in readers.items() if fields.has(name)}
    return defaults if fields.boolean("do_sample", True) else {**defaults, "temperature": 0.0}


def _refuse_revision(model: str, revision: str | None) -> None:
    """Raise ModelLoadError for a revision beside a model that does not come from the hub."""
    if revision is not None:
        reason = f"got revision {revision!r}; only org/name of a hub has revisions"
        raise ModelLoadError(f"model {model!r}: {reason}, leave it out")


def _local_source(model: str, path: Path) -> ModelSource:
    """Return the model in this directory or file; ModelLoadError if it is of neither format."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(model, "safetensors", path)
        if ggufs := sorted(path.glob("*.gguf")):
            raise ModelLoadError(f"model {model!r}: the directory has no config.json but a GGUF file: give {ggufs[0]}")
        raise ModelLoadError(
            f"model {model!r}: the directory has no config.json; wanted a checkpoint of safetensors with its "
            "config.json and tokenizer, or a .gguf file"
        )
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(GGUF_MAGIC):
        return ModelSource(model, "gguf", path)
    hint = f": give its directory, {path.parent}" if path.suffix in (".safetensors", ".json") else ""
    raise ModelLoadError(f"model {model!r}: the file starts with {head!r}, a GGUF file with {GGUF_MAGIC!r}{hint}")


def _unknown_model(model: str, path: Path) -> str:
    """Return the error text for a name that is no model, with the nearest name that is."""
    near: object = nearest(model, BUILTIN_MODELS)
    if near is None and path.parent.is_dir():
        sibling = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
        near = sibling and path.parent / sibling
    hint = f"did you mean {near}?" if near else "check the path"
    return (
        f"model {model!r}: no such file or directory; {hint} "
        f"(a model is a directory, a .gguf file, org/name[@revision], or a built-in: {', '.join(BUILTIN_MODELS)})"
    )


def _hub_snapshot(model: str, repo: str, revision: str | None, with_weights: bool) -> Path:
    """Return the snapshot's directory in the hub's own cache; download missing files unless HF_HUB_OFFLINE is set."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [pattern for pattern in HUB_FILES if with_weights or pattern != WEIGHT_FILES]
    try:
        snapshot = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=list(EXCLUDED_HUB_FILES)
        )
    except LocalEntryNotFoundError as error:
        reason = "neither a path nor in the hub's cache, and the hub is offline or out of reach"
        raise ModelLoadError(f"model {model!r}: {reason}: check the name, or give --model DIR") from error
    # The hub's HTTP client raises errors without a common base class.
    except Exception as error:
        raise ModelLoadError(
            f"model {model!r}: no such path, and the hub refused it: {one_line(error)}; check the name, or give "
            "--model DIR"
        ) from error
    return Path(snapshot)
