"""Opens a model without its weights: config, tensor headers, tokenizer, sampling defaults.

Every fault of a model that can be found before its weights are read is found here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..checks import refusal, shown
from ..config.engine_config import EngineConfig
from ..errors import ConfigError, InvalidRequestError, ModelLoadError
from ..models.config.decoder import DecoderConfig
from ..models.config.spec import ModelSpec
from ..models.formats.checkpoint import Checkpoint
from ..models.formats.files import CONFIG_FILE, GENERATION_FILE, MANIFEST_FILE, check_manifest
from ..models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from ..models.formats.tree_checkpoint import lies_on_several_devices
from ..models.opening.gguf_checkpoint import GGUFCheckpoint
from ..models.opening.open_checkpoint import open_checkpoint, read_config
from ..models.own_model import OwnModel, open_own_model
from ..models.weights.at_load import QuantizedCheckpoint, transposed_matrices
from ..models.weights.coded import stored_formats
from ..models.weights.kept_weights import FileState, file_states
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.sampling_params import SamplingParams
from ..text.answers.format_names import find_format
from ..text.grammar.grammar import Grammars
from ..text.prompts import PromptEncoder
from ..text.tokenizing.tokenizer import MORE_FILES, TOKENIZER_FILES, Tokenizer, has_tokenizer, load_tokenizer
from .model_source import ModelSource, read_generation_defaults, resolve_model, resolve_tokenizer

if TYPE_CHECKING:
    from flax import nnx

logger = logging.getLogger("jpaged")

FILE_OPTIONS = ("revision", "load_format", "hf_overrides", "dtype", "generation_config", "quantization")
"""Options that say how a model's files are read, and how its weights are kept."""


@dataclass(frozen=True)
class ModelHandle:
    """A model whose config, tensor headers and tokenizer have been read and belong together."""

    source: ModelSource | None
    """Where its files are; None for a caller's own module."""
    config: DecoderConfig | OwnModel
    checkpoint: Checkpoint | None
    """None with random weights (`load_format` dummy), and in an engine, whose weights are loaded."""
    weight_files: tuple[FileState, ...]
    """The files that the weights are read from, as they were opened; none if they come from no file or from folders."""
    arrays: Mapping[str, Any] | None
    """The weights as a tree: those of a caller's own module, or `params` with arrays on several devices. None for all
    other models, and in an engine."""
    tokenizer: Tokenizer | None
    """None with `skip_tokenizer_init`, and where neither weights nor a tokenizer are read from the directory."""
    sampling_defaults: dict[str, Any]
    """SamplingParams fields that the model's generation config, or its model card, sets."""
    eos_token_ids: frozenset[int]
    """Token ids of the model that end a reply: those of its config, the generation config and the tokenizer.

    The config of a GGUF file has all tokens that its metadata name as ends or that llama.cpp knows by their text.
    """
    grammars: Grammars | None
    """Compiles the grammars of requests; None without a tokenizer."""

    @property
    def spec(self) -> ModelSpec:
        """Return what the engine reads of the model."""
        return self.config.spec

    @property
    def decoder(self) -> DecoderConfig:
        """Return the config of a model that was read from files."""
        assert isinstance(self.config, DecoderConfig), "a module of the caller's own"
        return self.config

    @property
    def ends(self) -> str:
        """Return the tokens that end a reply as text for messages, such as "2 (<|im_end|>), 0 (<|end|>)".

        The tokenizer's own end token comes first, then the others by id. Without a tokenizer, and for ids that the
        tokenizer has no token for, there is only the id. The text is empty if no token ends a reply.
        """
        first = None if self.tokenizer is None else self.tokenizer.eos_token_id
        ids = sorted(self.eos_token_ids, key=lambda token_id: (token_id != first, token_id))
        texts = [None if self.tokenizer is None else self.tokenizer.backend.id_to_token(token_id) for token_id in ids]
        return ", ".join(f"{i} ({text})" if text else str(i) for i, text in zip(ids, texts, strict=True))

    def check_weight_files(self) -> None:
        """Compare the SHA-256 sums of the weight files with the manifest in the model's directory.

        Every byte of the weights is read, so call this after all cheaper checks. Does nothing if the weights come from
        no file, or if there is no manifest. Raises ModelLoadError if a sum differs, or a file is missing or unlisted.
        """
        if self.checkpoint is not None and self.source is not None:
            _check_sums(self.source, [file.relative_to(self.source.directory) for file in self.checkpoint.files()])

    def prompt_encoder(
        self, config: EngineConfig, rules_spec: LogitRulesSpec, max_model_len: int, chat_template: str | None = None
    ) -> PromptEncoder:
        """Return what encodes and checks prompts for this model.

        Prompts may have at most `max_model_len` tokens, and at most as many as `config.limits` lets wait. Chats are
        rendered by `chat_template`, a Jinja2 text, or by the model's own template if it is None.
        """
        return PromptEncoder(
            self.tokenizer,
            rules_spec,
            max_model_len,
            chat_template,
            config.limits,
            self.eos_token_ids,
            self.grammars,
            config.tool_call_parser,
            config.reasoning_parser,
        )


def open_model(config: EngineConfig) -> ModelHandle:
    """Find the model that `config` names, download it if necessary, and read all of it but the weights.

    Reads config, tensor headers, tokenizer and sampling defaults, and checks that they belong together. Weight files
    are needed neither with `load_format` dummy, which makes random weights, nor with `params`, which holds the arrays.
    Files are compared with the manifest of SHA-256 sums, if there is one, before they are read. The end tokens of the
    config, the generation config and the tokenizer are united. Raises ModelLoadError, which names the file and what to
    do, and ConfigError if `load_format` does not fit the files, or for an unknown logical axis in `sharding_rules`.
    """
    config.check_logical_axes(())
    is_read = config.load_format != "dummy" and config.params is None
    source = resolve_model(config.model, revision=config.revision, load_format=config.load_format, with_weights=is_read)
    _check_sums(source, _small_files(config, source))
    checkpoint: Checkpoint | None = None
    weight_files: tuple[FileState, ...] = ()
    if config.load_format == "dummy":
        model_config = read_config(source.path, config.hf_overrides)
    else:
        model_config, checkpoint = open_checkpoint(
            source.path, orbax=source.orbax, params=config.params, overrides=config.hf_overrides
        )
        weight_files = file_states(checkpoint.files())
    if model_config.has_head_though_tied:
        fault = "the config ties embedding and output, and the weights have a matrix for each"
        logger.warning("%s: %s: both serve", source.path, fault)
    for note in checkpoint.notes() if isinstance(checkpoint, SafetensorsCheckpoint) else ():
        logger.info("%s: %s", source.path, note)
    tokenizer = _open_tokenizer(config, source, checkpoint)
    if isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.file.drop_metadata()
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model_config.vocab_size, config.tokenizer or source.path)
    _check_answer_format(config, tokenizer)
    defaults = read_generation_defaults(source, only_eos=config.generation_config == "none")
    # The end tokens are no sampling parameter: they are taken out of the defaults here.
    end_ids = _end_ids((*model_config.eos_token_ids, *defaults.pop("eos_token_id", ())), tokenizer, model_config.spec)
    try:
        SamplingParams(**defaults)  # Made only for its checks of the values.
    except InvalidRequestError as error:
        fault = f"its generation config is out of range: {error}"
        raise ModelLoadError(f"{source.path}: {fault}; give --generation-config none") from error
    if checkpoint is not None:
        checkpoint = _quantized(config, model_config, checkpoint)
    arrays = config.params if config.params is not None and lies_on_several_devices(config.params) else None
    grammars = _grammars(tokenizer, model_config.spec, end_ids)
    return ModelHandle(source, model_config, checkpoint, weight_files, arrays, tokenizer, defaults, end_ids, grammars)


def _grammars(tokenizer: Tokenizer | None, model: ModelSpec, eos_token_ids: frozenset[int]) -> Grammars | None:
    """Return what compiles the grammars of requests; nothing is compiled or imported yet. None without a tokenizer."""
    return None if tokenizer is None else Grammars(tokenizer, model.vocab_size, eos_token_ids)


def open_module(config: EngineConfig, module: nnx.Module, *, call: str, head: str) -> ModelHandle:
    """Return a model that is the caller's own `module` rather than files.

    `call` and `head` are the names of its methods that compute hidden states and logits. The weights are
    `config.params`, or the module's own arrays if `params` is None. The tokenizer is the one that
    `config` names, if any. There are no sampling defaults. Raises ModelLoadError if the module or the tokenizer cannot
    serve, and ConfigError for a module of `load_module`, if one of FILE_OPTIONS differs from its default, or if
    `sharding_rules` have a logical axis that neither the engine nor the module knows.
    """
    from ..models.weights.checkpoint_module import CheckpointModule  # With all that computes a model.

    if isinstance(module, CheckpointModule):
        source = f"Engine({module.origin.model!r}, params=module.hf_state())"
        raise refusal("model", "a module of load_module", f"what it came from: {source}", error=ConfigError)
    defaults = EngineConfig()
    for name in FILE_OPTIONS:
        if (got := getattr(config, name)) != getattr(defaults, name):
            allowed = "nothing beside a model of your own, which has no files"
            raise refusal(name, shown(got), allowed, "leave it out", error=ConfigError)
    model, arrays = open_own_model(module, axes=config.axis_table, call=call, head=head)
    config.check_logical_axes(model.axis_names)
    tokenizer = None if config.tokenizer is None else _open_tokenizer(config, None, None)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, model.spec.vocab_size, config.tokenizer)
    _check_answer_format(config, tokenizer)
    end_ids = _end_ids(model.spec.eos_token_ids, tokenizer, model.spec)
    arrays = arrays if config.params is None else config.params
    grammars = _grammars(tokenizer, model.spec, end_ids)
    return ModelHandle(None, model, None, (), arrays, tokenizer, {}, end_ids, grammars)


def _check_answer_format(config: EngineConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError for names of formats that are not known, or a `response_template` that is broken."""
    if tokenizer is not None:
        template = (tokenizer.chat_template or "") + (tokenizer.tool_template or "")
        find_format(template, tokenizer, config.tool_call_parser, config.reasoning_parser)
        return
    for name in ("tool_call_parser", "reasoning_parser"):
        if (got := getattr(config, name)) is not None:
            raise refusal(name, shown(got), "none without a tokenizer", "leave it out", error=ConfigError)


def _end_ids(token_ids: Iterable[int], tokenizer: Tokenizer | None, model: ModelSpec) -> frozenset[int]:
    """Return the ids that end a reply: `token_ids` and the tokenizer's end token, without ids beyond the vocabulary.

    An id beyond the vocabulary is dropped because the model cannot draw it.
    """
    tokenizer_id = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(i for i in (*token_ids, tokenizer_id) if i is not None and i < model.vocab_size)


def checkpoint_again(config: EngineConfig, handle: ModelHandle) -> Checkpoint | None:
    """Open the checkpoint of a running engine's model once more, to read its weights again.

    Returns None if the weights came from no file: from a caller's module, from `params`, or drawn at random. Raises
    ModelLoadError if the files cannot be opened. Raises it too if the engine uses one matrix as embedding and output
    matrix (tied) and the files now have two, since the compiled programs have no room for the second.
    """
    if handle.source is None or config.params is not None or config.load_format == "dummy":
        return None
    source = handle.source
    model, checkpoint = open_checkpoint(source.path, orbax=source.orbax, overrides=config.hf_overrides)
    if handle.decoder.tie_word_embeddings and not model.tie_word_embeddings:
        fault = "its output matrix now differs from its embedding, and this engine has one matrix for both"
        raise ModelLoadError(f"{checkpoint.path}: {fault}: start a new engine")
    return _quantized(config, model, checkpoint)


def _quantized(config: EngineConfig, model: DecoderConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as `config.quantization` wants it read. Raises ConfigError for one that is quantized."""
    if config.quantization in ("auto", "none"):
        return checkpoint
    got = shown(config.quantization)
    if isinstance(checkpoint, GGUFCheckpoint | SafetensorsCheckpoint) and checkpoint.is_quantized:
        quantized = checkpoint.quantization if isinstance(checkpoint, SafetensorsCheckpoint) else None
        kind = f" by {quantized.method}" if quantized else ""
        fault = f"{got} for {checkpoint.path}, whose weights are quantized{kind}"
        allowed = (
            "auto, which keeps them, or none" if stored_formats(checkpoint) else "auto or none, which make them floats"
        )
        raise refusal("quantization", fault, allowed, error=ConfigError)
    return QuantizedCheckpoint(checkpoint, config.quantization, transposed_matrices(model, checkpoint.names()))


def _small_files(config: EngineConfig, source: ModelSource) -> list[PurePath]:
    """Return the files that are read before the weights, relative to the directory of the model."""
    if source.kind == "gguf":
        return []  # A GGUF file holds config, tokenizer and weights.
    has_own_tokenizer = not config.skip_tokenizer_init and config.tokenizer is None
    names = (CONFIG_FILE, GENERATION_FILE, *((*TOKENIZER_FILES, *MORE_FILES) if has_own_tokenizer else ()))
    return [PurePath(name) for name in names]


def _check_sums(source: ModelSource, files: list[PurePath]) -> None:
    """Compare `files`, relative to the model's directory, with the manifest of SHA-256 sums there, if there is one.

    Raises ModelLoadError if a sum differs, a listed file is missing, or the manifest does not list one of `files`. An
    unlisted GGUF file is only logged, because the manifest may be about other files in the same directory.
    """
    if not (unlisted := check_manifest(source.directory, files)):
        return
    path = source.directory / MANIFEST_FILE
    if source.kind != "gguf":
        way_out = "add its sum or remove the file"
        raise ModelLoadError(f"{path}: does not list {unlisted[0]}, which would be read: {way_out}")
    logger.info("%s: does not list %s, which is not checked", path, ", ".join(unlisted))


def _check_vocabulary(tokenizer: Tokenizer, num_rows: int, path: object) -> None:
    """Raise ModelLoadError if a tokenizer does not fit an embedding of `num_rows` rows. Errors name `path`.

    The base vocabulary and the tokens that begin and end sequences must have rows. Added tokens may lie beyond: Gemma 3
    has one for images even in models of text alone. They are logged, and prompts that hold one are refused later.
    """
    # A list times a bool: empty if the base vocabulary fits. Only the first fault is reported.
    faults = [f"the tokenizer has {tokenizer.base_vocab_size} ids"] * (tokenizer.base_vocab_size > num_rows)
    for name, token_id in ("bos_token", tokenizer.bos_token_id), ("eos_token", tokenizer.eos_token_id):
        if token_id is not None and token_id >= num_rows:
            faults.append(f"the tokenizer's {name} has the id {token_id}")
    if faults:
        reason = f"the model's embedding {num_rows} rows; tokenizer and weights belong to different models"
        raise ModelLoadError(f"{path}: {faults[0]}, {reason}")
    if tokenizer.vocab_size > num_rows:
        logger.info(
            "tokenizer: the model has no rows for its added tokens from id %s to %s; prompts with one are refused",
            num_rows,
            tokenizer.vocab_size - 1,
        )


def _open_tokenizer(
    config: EngineConfig, source: ModelSource | None, checkpoint: Checkpoint | None
) -> Tokenizer | None:
    """Return the tokenizer that `config` names, or else the one in the model's files.

    Returns None with `skip_tokenizer_init`. Also None if the model's weights are not read from files (random, or
    `params`) and its directory has no tokenizer. `source` may be None only if `config` names a tokenizer or skips it.
    `checkpoint` saves reading a GGUF file twice. Raises ModelLoadError if a tokenizer is missing or broken.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        path = resolve_tokenizer(config.tokenizer)
        if not has_tokenizer(path):
            wanted = f"one of {', '.join(TOKENIZER_FILES)}: give a tokenizer's directory"
            raise ModelLoadError(f"tokenizer {config.tokenizer!r}: the directory has no tokenizer, wanted {wanted}")
        return load_tokenizer(path)
    assert source is not None
    is_optional = config.load_format == "dummy" or config.params is not None
    if is_optional and not has_tokenizer(source.path):
        return None
    return load_tokenizer(source.path, checkpoint.file if isinstance(checkpoint, GGUFCheckpoint) else None)
