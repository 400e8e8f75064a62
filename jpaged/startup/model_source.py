"""Finds the files of the model that the user names, and reads the sampling defaults that come with them.

A model is a directory, a GGUF file, `org/name[@revision]` of the Hugging Face hub, or the name of a built-in. The
models room opens what is found here. Imports neither jax nor transformers, so that a wrong name is reported at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..checks import nearest, one_line, refusal, shown
from ..errors import ConfigError, ModelLoadError
from ..models.fields import Fields, read_json_object
from ..models.formats.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    STEP_FILE,
    TREE_FILE,
    UNFINISHED_ORBAX,
)
from .builtin_model import BUILTIN_MODELS, fetch_builtin

logger = logging.getLogger("jpaged")

GGUF_MAGIC = b"GGUF"
WEIGHT_FILES = "*.safetensors"
HUB_FILES = ("*.json", WEIGHT_FILES, "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Files that are downloaded: weights, configs and tokenizers, and nothing that could be code or a pickle."""
FLAX_PREFIX = "checkpoint"
"""What flax puts before the step in the name of a checkpoint's folder unless it is told otherwise."""
EXCLUDED_HUB_FILES = ("*/*", "consolidated*")
"""Files that are not downloaded though HUB_FILES match: second copies of the weights in other formats."""

UNUSED_GENERATION_KEYS: Mapping[str, tuple[Any, ...]] = {
    "max_new_tokens": (), "max_length": (20,), "max_time": (), "min_length": (0,), "min_new_tokens": (0,),
    "stop_strings": ([],), "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,),
    "length_penalty": (1,), "early_stopping": (False,), "num_return_sequences": (1,), "penalty_alpha": (0,),
    "dola_layers": (), "presence_penalty": (0,), "frequency_penalty": (0,), "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],),
    "force_words_ids": ([],), "constraints": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}), "forced_bos_token_id": (), "forced_eos_token_id": (), "forced_decoder_ids": ([],),
    "exponential_decay_length_penalty": (), "guidance_scale": (1, 0), "watermarking_config": ({},),
    "token_healing": (False,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (),
}  # fmt: skip
"""Keys of generation_config.json that transformers generates by and that have no effect here → values that mean off.

Null means off for each of them; 20 is the maximum length that transformers wrote where none was set."""
RANDOM_KEYS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Keys of UNUSED_GENERATION_KEYS that have an effect only where tokens are drawn."""

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is. `name` is what the user gave; `path` is a directory with config.json, or a file (gguf)."""

    name: str
    kind: Literal["safetensors", "orbax", "gguf"]
    path: Path
    default_sampling: Mapping[str, float | int] | None = None
    """Sampling defaults of a built-in model, whose file cannot carry them."""
    orbax: Path | None = None
    """The folder of orbax that holds the weights, `path` or one inside of it, or several such folders."""

    @property
    def identity(self) -> str:
        """Return a name that tells this model from others.

        It is the name of a built-in, the resolved path of a local model, or "org/name@" and the commit of the snapshot
        for a model of the hub. Files that change under the same path keep the same identity.
        """
        if self.name in BUILTIN_MODELS:
            return self.name
        is_local = Path(self.name).expanduser().exists()
        return str((self.orbax or self.path).resolve()) if is_local else f"{self.name}@{self.path.name}"

    @property
    def directory(self) -> Path:
        """Return the directory that the files are in."""
        return self.path.parent if self.kind == "gguf" else self.path


def resolve_model(
    model: str, *, revision: str | None = None, load_format: str = "auto", with_weights: bool = True
) -> ModelSource:
    """Find the files of `model`, download them if necessary, and return where they are. No weights are read.

    A built-in name is taken first, then a path that exists, then a name of the hub. A directory with both safetensors
    and an orbax checkpoint counts as safetensors, unless `load_format` is orbax. If there are orbax checkpoints in
    folders named by training step, the newest is taken. If `with_weights` is false, no weights are downloaded from the
    hub, and the format of weights is not checked. Raises ModelLoadError, one line with the way out, if there is no such
    model, and ConfigError if its weights have another format than `load_format`.
    """
    if model in BUILTIN_MODELS:
        _refuse_revision(model, revision)
        if with_weights:
            _check_format(model, "gguf", load_format)  # Before the download.
        builtin = BUILTIN_MODELS[model]
        sampling = {"temperature": builtin.temperature, "top_p": builtin.top_p}
        found = ModelSource(model, "gguf", fetch_builtin(builtin), sampling)
    else:
        path = _find("model", model, revision, load_format, with_weights)
        with _readable("model", model):
            found = _local_source(model, path, load_format, with_weights)
        if with_weights:
            _check_format(model, found.kind, load_format)
    return found


def resolve_tokenizer(tokenizer: str) -> Path:
    """Find a tokenizer by the name of a model or a path: a directory or a GGUF file. Raises ModelLoadError."""
    if tokenizer in BUILTIN_MODELS:
        return fetch_builtin(BUILTIN_MODELS[tokenizer])
    return _find("tokenizer", tokenizer, None, "auto", with_weights=False)


def _find(kind: str, name: str, revision: str | None, load_format: str, with_weights: bool) -> Path:
    """Return the path `name` if it exists, else the downloaded snapshot of the hub's repository of that name.

    A name of the hub is org/name, or org/name@revision. `kind` is "model" or "tokenizer", for error messages. Raises
    ModelLoadError if there is neither a path nor a repository, or if a revision is given for a path, or twice with
    different values; ConfigError if `load_format` asks for weights that the hub's files do not have.
    """
    with _readable(kind, name):
        path = Path(name).expanduser()
        if name and path.exists():  # An empty name would be the current folder.
            _refuse_revision(name, revision)
            return path
        match = _HUB_NAME.fullmatch(name)
        if match is None:
            raise ModelLoadError(_unknown_model(kind, name, path))
    if revision and match["revision"] and revision != match["revision"]:
        raise ModelLoadError(f"{kind} {name!r}: the revision is given twice, as {revision!r} too: give one of them")
    if with_weights:
        _check_format(name, "safetensors", load_format)  # The hub's other files are not fetched.
    return _hub_snapshot(kind, name, match["repo"], revision or match["revision"], with_weights)


@contextmanager
def _readable(kind: str, name: str) -> Iterator[None]:
    """Turn an operating system error into a ModelLoadError, such as a folder that may not be read.

    RuntimeError is what `Path.expanduser` raises if `~user` names no user.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        way_out = "check the path and its permissions"
        raise ModelLoadError(f"{kind} {name!r}: cannot be read ({error}); {way_out}") from error


def _check_format(model: str, kind: str, load_format: str) -> None:
    """Raise ConfigError if `load_format` asks for another kind of checkpoint than `kind`, that of `model`.

    "auto" takes every kind, and "hf" means safetensors.
    """
    wanted = "safetensors" if load_format == "hf" else load_format
    if wanted not in ("auto", kind):
        allowed = f"auto or {kind}, since {model} is no checkpoint of {wanted}"
        raise refusal("load_format", shown(load_format), allowed, "give one of these", error=ConfigError)


def read_generation_defaults(source: ModelSource, *, only_eos: bool = False) -> dict[str, Any]:
    """Read the sampling defaults in the model's generation_config.json. Only keys that the file sets are returned.

    They may be temperature, top_p, top_k, min_p, repetition_penalty, and eos_token_id as a list of the ids that end a
    reply. `do_sample: false` becomes temperature 0, whatever temperature the file has. With `only_eos` only
    eos_token_id is read. Without such a file, and for a GGUF file, the result is empty, or has the model card's
    defaults of a built-in model if `only_eos` is false. A warning names other keys by which transformers would generate
    differently. Raises ModelLoadError if a value has a wrong type or is out of range.
    """
    path = source.path / GENERATION_FILE
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
        "top_p": partial(fields.number, min=0, max=1),
        "top_k": partial(fields.integer, min=-1),
        "min_p": partial(fields.number, min=0, max=1),
        "repetition_penalty": partial(fields.number, above=0),
    }
    defaults |= {name: read(name) for name, read in readers.items() if fields.has(name)}
    is_random = fields.boolean("do_sample", True)
    _warn_of_unused(path, fields.data, is_random=is_random)
    return defaults if is_random else {**defaults, "temperature": 0.0}


def _warn_of_unused(path: Path, data: Mapping[str, Any], *, is_random: bool) -> None:
    """Log one warning that names the keys of a generation config that this engine ignores although they are not off.

    `path` is the file and `data` its content. A key is off if it is null or has one of its values in
    UNUSED_GENERATION_KEYS. `is_random` is the file's `do_sample`: if it is false, keys that only change how tokens are
    drawn (RANDOM_KEYS) have no effect in transformers either, and are not named. If no key is left, nothing is logged.
    """
    unused = [
        f"{key} {shown(data[key])}"
        for key, off_values in UNUSED_GENERATION_KEYS.items()
        if data.get(key) is not None and data[key] not in off_values and (is_random or key not in RANDOM_KEYS)
    ]
    if unused:
        as_in_vllm = "; vLLM ends outputs at max_new_tokens, this engine does not" if "max_new_tokens" in data else ""
        way_out = f"set what you need with each request (max_tokens, presence_penalty, stop, …){as_in_vllm}"
        logger.warning("%s: not used: %s; %s", path, ", ".join(unused), way_out)


def _refuse_revision(model: str, revision: str | None) -> None:
    """Raise ModelLoadError for a revision beside a model that does not come from the hub."""
    if revision is not None:
        reason = f"got revision {revision!r}; only org/name of a hub has revisions"
        raise ModelLoadError(f"model {model!r}: {reason}, leave it out")


def _local_source(model: str, path: Path, load_format: str, with_weights: bool) -> ModelSource:
    """Return the model in the directory or GGUF file `path`, which exists.

    Raises ModelLoadError for a file that is not GGUF, and for a directory without a checkpoint that can be read.
    """
    if path.is_dir():
        return _directory_source(model, path, load_format, with_weights)
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(GGUF_MAGIC):
        return ModelSource(model, "gguf", path)
    hint = f": give its directory, {path.parent}" if path.suffix in (".safetensors", ".json") else ""
    raise ModelLoadError(f"model {model!r}: the file starts with {head!r}, a GGUF file with {GGUF_MAGIC!r}{hint}")


def _directory_source(model: str, path: Path, load_format: str, with_weights: bool) -> ModelSource:
    """Return the model in a directory: its safetensors, or else the one orbax checkpoint that it is or holds.

    Orbax checkpoints are looked at only if there are no safetensors or `load_format` is orbax. config.json must be in
    the directory. For an orbax checkpoint it may also be in the checkpoint's folder or up to two levels above, because
    orbax's CheckpointManager writes root/step/default. Without `with_weights` only config.json is needed, and the kind
    is "safetensors", which then means nothing. If a manager saved several checkpoints as parts of one step, such as
    root/step/params and root/step/opt_state, the source is their folder. Raises ModelLoadError if config.json is
    missing or there are several orbax checkpoints otherwise. If one was chosen by its training step, that is logged.
    """
    trees = _trees(path)  # Folders of orbax checkpoints: of the newest training step, if they are named by steps.
    has_safetensors = any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    trees = trees if load_format == "orbax" or not has_safetensors else []
    config_dirs = [path, trees[0], *list(trees[0].parents)[:2]] if trees else [path]
    config_dir = next((folder for folder in config_dirs if (folder / CONFIG_FILE).is_file()), None)
    if config_dir is None:
        raise ModelLoadError(f"model {model!r}: {_missing_config(path, trees)}")
    if not with_weights or not trees:
        return ModelSource(model, "safetensors", config_dir)
    if len(trees) > 1 and len({tree.parent for tree in trees}) == 1 and (trees[0].parent / STEP_FILE).is_file():
        trees = [trees[0].parent]
    if len(trees) > 1:
        names = ", ".join(tree.relative_to(path).as_posix() for tree in trees[:10])
        raise ModelLoadError(f"model {model!r}: holds {len(trees)} orbax checkpoints ({names}): give one of them")
    if trees[0] != path and _step(trees[0], path) is not None:
        logger.info("%s: step %s is read, the newest one", path, _step(trees[0], path))
    return ModelSource(model, "orbax", config_dir, orbax=trees[0])


def _trees(path: Path) -> list[Path]:
    """Return the folders of orbax checkpoints to choose from: `path` itself, or folders in it. May be empty.

    If folders in `path` are named by training step, such as path/12 or path/12/default, only those of the highest step
    are returned; otherwise the checkpoints directly in `path`. A checkpoint is a folder that holds TREE_FILE. Those
    that orbax has not finished, by their name, are left out. Example: path/9 and path/12/default give path/12/default.
    """
    if (path / TREE_FILE).is_file():
        return [path]
    patterns = f"*/{TREE_FILE}", f"[0-9]*/*/{TREE_FILE}", f"*_[0-9]*/*/{TREE_FILE}"
    found = {file.parent for pattern in patterns for file in path.glob(pattern)}
    trees = sorted(tree for tree in found if UNFINISHED_ORBAX not in str(tree.relative_to(path)))
    steps = [step for tree in trees if (step := _step(tree, path)) is not None]
    if steps:
        return [tree for tree in trees if _step(tree, path) == max(steps)]
    return [tree for tree in trees if tree.parent == path]


def _step(tree: Path, root: Path) -> int | None:
    """Return the training step that the first folder of `tree` below `root` is named by, or None for another name.

    For root/12/default and for flax's root/checkpoint_12 that is 12. A checkpoint manager may be told any other prefix:
    root/run_12/default has the step 12 if root/run_12 has STEP_FILE. `tree` must lie below `root`.
    """
    first, *inner = tree.relative_to(root).parts
    prefix, _, number = first.rpartition("_")
    is_step = prefix in ("", FLAX_PREFIX) or (inner != [] and (root / first / STEP_FILE).is_file())
    return int(number) if is_step and number.isascii() and number.isdigit() else None


def _missing_config(path: Path, trees: list[Path]) -> str:
    """Return the error text for the directory `path`, where no config.json was found: what it holds, and what to do.

    `trees` are the folders of orbax checkpoints in it.
    """
    if trees:
        where = "inside or up to two levels above it"
        return f"the orbax checkpoint {trees[0]} has no config.json {where}: put the model's there"
    if ggufs := sorted(path.glob("*.gguf")):
        return f"the directory has no config.json but a GGUF file: give {ggufs[0]}"
    return (
        "the directory has no config.json; wanted a checkpoint of safetensors or orbax with its config.json and "
        "tokenizer, or a .gguf file"
    )


def _unknown_model(kind: str, name: str, path: Path) -> str:
    """Return the error text for a name that is no model, with a name that is spelled nearly the same, if any.

    Built-in models are searched first, then the entries of the folder that `path` would be in. `kind` is "model" or
    "tokenizer".
    """
    near: object = nearest(name, BUILTIN_MODELS)
    if near is None and path.parent.is_dir():
        sibling = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
        near = sibling and path.parent / sibling
    hint = f"did you mean {near}?" if near else "check the path"
    return (
        f"{kind} {name!r}: no such file or directory; {hint} "
        f"(a {kind} is a directory, a .gguf file, org/name[@revision], or a built-in: {', '.join(BUILTIN_MODELS)})"
    )


def _hub_snapshot(kind: str, name: str, repo: str, revision: str | None, with_weights: bool) -> Path:
    """Return the directory of the repository's snapshot in the hub's own cache, after downloading what is missing.

    With HF_HUB_OFFLINE set, nothing is downloaded. `revision` None is the main branch. Without `with_weights` all files
    but the weights are fetched. `kind` and `name` are for errors: ModelLoadError if there is no snapshot to return.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [pattern for pattern in HUB_FILES if with_weights or pattern != WEIGHT_FILES]
    try:
        snapshot = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=list(EXCLUDED_HUB_FILES)
        )
    except LocalEntryNotFoundError as error:
        reason = "neither a path nor in the hub's cache, and the hub is offline or out of reach"
        raise ModelLoadError(f"{kind} {name!r}: {reason}: check the name, or give --{kind} DIR") from error
    # The hub's HTTP client raises errors without a common base class.
    except Exception as error:
        fault = f"no such path, and the hub refused it: {one_line(error)}"
        raise ModelLoadError(f"{kind} {name!r}: {fault}; check the name, or give --{kind} DIR") from error
    return Path(snapshot)
