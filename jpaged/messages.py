"""The message by which a request reaches the host core, after all its arguments were checked.

A message is frozen, and holds plain values only. It knows neither pages nor steps, and this module loads no JAX.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .sampling.sampling_params import OWN_SCORE, RequestParams, ScoreKind

if TYPE_CHECKING:
    from .sampling.sampling_params import BeamSearchParams, SamplingParams

    Params = SamplingParams | BeamSearchParams
else:  # Decoders of messages know no union of dataclasses: `codec`.
    Params = RequestParams

INT32_BYTES = 4
"""Bytes of a token id where a message packs them."""


class ResultForm(enum.Enum):
    """In which form the results of a request are kept."""

    ENTRIES = "entries"
    """As outputs show them, with a `Logprob` for each token."""
    ARRAYS = "arrays"
    """As numbers: the logprobs of the tokens that were drawn."""


class Scoring(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request computes that draws no token: the scores of given tokens."""

    continuations: tuple[bytes, ...]
    """The tokens of each sample after the prompt, int32, at least one."""
    temperatures: tuple[float, ...]
    """The temperature at which each sample is scored."""
    first: int = 0
    """Index of the first token of each continuation that is scored."""
    kind: ScoreKind = OWN_SCORE
    asked: tuple[bytes, ...] = ()
    """For each sample the other tokens that are scored at each place of its continuation, int32 [N, S] for
    `kind.num_asked` S."""


class AnswerSpec(msgspec.Struct, frozen=True, gc=False):
    """What a request says of its answers."""

    tools: Mapping[str, Mapping[str, tuple[str, ...]]] | None = {}
    """Each tool's name → its parameters' names → the types that JSON Schema allows for them, empty where it names none.
    Empty: calls are not looked for. None: the tools are not known, and every name is one."""
    custom_tools: frozenset[str] = frozenset()
    """Tools among `tools` whose input is text."""
    opening: str = ""
    """The end of the prompt, from the last message on: the text by which it has opened the answer."""
    has_thoughts: bool = True
    """Thoughts are told apart from the content."""
    skip_special_tokens: bool = True
    """Special tokens have no characters in the text."""


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as its front has checked and resolved it; `EngineCore.add` queues it.

    It is small, so that a long list of prompts can wait in this form.
    """

    request_id: str
    number: int
    """Counts requests from 0; part of the seed of a request without one."""
    prompt_token_ids: bytes
    """int32, one after the other, in the byte order of the machine."""
    prompt: str | None
    """The prompt's text, if it was given as one."""
    params: Params
    max_tokens: int
    """Output tokens of a sample at most: as its parameters ask, or what the context has left."""
    stop_ids: frozenset[int]
    """Tokens that end a sample or a beam: those that the parameters name, and EOS unless they ignore it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be generated."""
    mark_ids: frozenset[int] = frozenset()
    """Tokens whose places in the text its outputs tell (`outputs.Mark`)."""
    grammar: str = ""
    """The grammar that the output follows, as `text.grammar` writes it; empty without one."""
    unenforced: tuple[str, ...] = ()
    """What the schemas or grammars of its tools say without effect, a sentence for each reason."""
    answer: AnswerSpec | None = None
    """How thoughts and calls in its output are told apart; None: its output is text alone."""
    cache_salt: str | None = None
    priority: int = 0
    """Lower is sooner, under the policy `priority`."""
    arrival_time: float
    """In seconds of `time.monotonic()`."""
    form: ResultForm = ResultForm.ENTRIES
    scoring: Scoring | None = None
    """None for a request that draws tokens."""
    tempers_scores: bool = False
    """The logprobs of its prompt are those at its temperature, whatever the engine's mode of logprobs."""
    is_streamed: bool = False
    """Its caller is shown each token as it comes, so that no step draws several of one sample."""
    sent_names: Mapping[str, str] = {}
    """How errors call fields that the caller has sent under other names; see `checks.sent_as`."""
    policy_key: Any = None
    """The key that the scheduling policy gave it when it was checked; None if it has still to be checked."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.prompt_token_ids) // INT32_BYTES
