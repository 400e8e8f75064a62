"""Turns what the user calls a model into files on this machine, and reads the sampling that comes with them.

A model is a directory, a GGUF file, `org/name[@revision]` of a hub, or the name of a built-in. Knows no weights:
the models room opens what this finds. Imports neither jax nor transformers, so that a wrong name is said at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .builtin_model import BUILTIN_MODELS, fetch_builtin
from .errors import ModelLoadError
from .models.fields import Fields, read_json_object

DEFAULT_MODEL = "smollm2-135m"
GGUF_MAGIC = b"GGUF"
# Weights, configs and tokenizers; nothing that could be code or a pickle, and no second copy of the weights.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
HUB_FILES_LEFT = ("*/*", "consolidated*")

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is. `name` is what the user gave; `path` is a directory (safetensors) or a file (gguf).

    `default_sampling` is set for a built-in model, whose file cannot carry it.
    """

    name: str
    kind: Literal["safetensors", "gguf"]
    path: Path
    default_sampling: Mapping[str, float | int] | None = None


def resolve_model(model: str, *, revision: str | None = None) -> ModelSource:
    """Find `model`, downloading it if it has to be.

    What exists on this machine comes before a hub's name. Raises ModelLoadError, in one line with the nearest
    thing to do, if there is nothing to load under that name; weights are not looked at.
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
    # A name that is too long, a folder that may not be entered, a home that is nobody's.
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"model {model!r}: cannot be looked at ({error})") from error
    if revision and match["revision"] and revision != match["revision"]:
        raise ModelLoadError(f"model {model!r}: the revision is given twice, as {revision!r} too: give one of them")
    return _local_source(model, _hub_snapshot(model, match["repo"], revision or match["revision"]))


def read_generation_defaults(source: ModelSource, *, only_eos: bool = False) -> dict[str, Any]:
    """Read how the model's makers want it sampled: only the keys that they set. With `only_eos`, not even those.

    Keys: temperature, top_p, top_k, min_p, repetition_penalty, and eos_token_id as a list, each id of which stops
    a reply. `do_sample: false` is temperature 0. Nothing set, or no file, is an empty dict.
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
    if fields.has("temperature"):
        defaults["temperature"] = fields.number("temperature", least=0)
    if not fields.boolean("do_sample", True):
        defaults["temperature"] = 0.0
    if fields.has("top_p"):
        defaults["top_p"] = fields.number("top_p", above=0, most=1)
    if fields.has("top_k"):
        defaults["top_k"] = fields.integer("top_k", least=-1)
    if fields.has("min_p"):
        defaults["min_p"] = fields.number("min_p", least=0, most=1)
    if fields.has("repetition_penalty"):
        defaults["repetition_penalty"] = fields.number("repetition_penalty", above=0)
    return defaults


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(f"model {model!r}: revision {revision!r} is given; only org/name of a hub has revisions")


def _local_source(model: str, path: Path) -> ModelSource:
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(model, "safetensors", path)
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs:
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
    names = ", ".join(BUILTIN_MODELS)
    close = difflib.get_close_matches(model, BUILTIN_MODELS, n=1)
    if not close and path.parent.is_dir():
        siblings = {entry.name: entry for entry in path.parent.iterdir()}
        close = [str(siblings[name]) for name in difflib.get_close_matches(path.name, siblings, n=1)]
    hint = f"did you mean {close[0]}?" if close else "check the path"
    return (
        f"model {model!r}: no such file or directory; {hint} "
        f"(a model is a directory, a .gguf file, org/name[@revision], or a built-in: {names})"
    )


def _hub_snapshot(model: str, repo: str, revision: str | None) -> Path:
    """Return the snapshot's directory in the hub's own cache, downloading what is missing unless it is offline."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_FILES_LEFT)
        )
    except LocalEntryNotFoundError as error:
        reason = "it is neither a path here nor in the hub's cache, and the hub is offline or out of reach"
        raise ModelLoadError(f"model {model!r}: {reason}: check the name, or give --model DIR") from error
    # What its HTTP client raises has no base class that is ours to name, and whatever it is, there is no model.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"model {model!r}: is no path here, and the hub said: {reason}") from error
    return Path(snapshot)
