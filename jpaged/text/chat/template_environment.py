"""A Jinja2 environment with Hugging Face's conventions for chat templates, in Jinja2's sandbox, with limits.

Chat templates are untrusted programs, so the time that one takes and the length of what it makes are limited. Both are
checked cooperatively: at each iteration of a loop, at each call of a function or a filter, and wherever texts are
joined or put out. A single call that takes long or makes much is therefore found only after it returns. This module is
imported at first use. transformers has an environment with the same conventions and no limits, but importing it takes
0.4 s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ...limits import ceiling
from .chat_messages import NoContent

MAX_RENDER_S = float(ceiling("template_s"))
"""Time that rendering one chat may take, in seconds."""
MAX_LEN = ceiling("template_chars")
"""Largest size of one value that a template makes, the whole chat included: its characters, or, for a list or a
dictionary, its entries plus the sizes of their values."""
MAX_INT_BITS = 1 << 16
"""Largest size of an integer that a template computes, in bits."""

BYTE_ORDER_MARK = "\ufeff"
GIVEN_NAMES = frozenset(
    (
        "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "sep_token",
        "pad_token", "cls_token", "mask_token", "additional_special_tokens",
    )
)  # fmt: skip
"""Variables that every chat template is given, and that no request sets."""


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template takes more time or makes more than it may."""


class TemplateRefusal(jinja2.TemplateError):
    """A template calls `raise_exception`, with this message."""


class _Bounds(NamedTuple):
    """What rendering in a context may take."""

    seconds: float
    end_s: float
    """The time.monotonic() at which it has to be done."""
    max_len: int


_bounds: ContextVar[_Bounds] = ContextVar("_bounds")


def render(
    template: str, variables: Mapping[str, Any], *, max_s: float | None = None, max_chars: int | None = None
) -> str:
    """Return the text that the source `template` makes of `variables`, with limits of its own where they are given.

    Raise jinja2.TemplateSyntaxError for an invalid template, TemplateLimitError for one that takes more than `max_s`
    seconds, makes a value larger than `max_chars` or exceeds MAX_INT_BITS, TemplateRefusal where the template calls
    `raise_exception`, and any exception that it raises otherwise. The limits belong to this context: threads may render
    at once.
    """
    compiled = compile_template(template)
    seconds, max_len = MAX_RENDER_S if max_s is None else max_s, MAX_LEN if max_chars is None else max_chars
    before = _bounds.set(_Bounds(seconds, time.monotonic() + seconds, max_len))
    try:
        return compiled.render(variables)
    finally:
        _bounds.reset(before)


@lru_cache(maxsize=64)
def compile_template(template: str) -> jinja2.Template:
    """Return the compiled template of a source text; the 64 that were used last are cached.

    A byte-order mark at the start is dropped: some editors write it, and it would be part of every prompt. Raise
    jinja2.TemplateSyntaxError for an invalid template and for one that is nested too deep.
    """
    try:
        return _environment().from_string(template.removeprefix(BYTE_ORDER_MARK))
    except jinja2.TemplateSyntaxError:
        raise
    except Exception as error:  # Python limits how deep blocks and brackets may nest.
        raise jinja2.TemplateSyntaxError(f"Python cannot compile it: {error}", lineno=1) from error


@lru_cache(maxsize=64)
def template_arguments(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set itself, beside what every template is given.

    These are what a request may set, such as `enable_thinking`. Raise jinja2.TemplateSyntaxError for an invalid
    template.
    """
    environment = _environment()
    names = jinja2.meta.find_undeclared_variables(environment.parse(template.removeprefix(BYTE_ORDER_MARK)))
    return frozenset(names - environment.globals.keys() - GIVEN_NAMES)


@lru_cache(maxsize=64)
def texts_of(template: str) -> frozenset[str]:
    """Return the texts that stand as constants in the expressions of a valid template."""
    parsed = _environment().parse(template.removeprefix(BYTE_ORDER_MARK))
    return frozenset(one.value for one in parsed.find_all(nodes.Const) if isinstance(one.value, str))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Return the sandboxed environment with the limits and Hugging Face's filters, tests and functions.

    It is made once and shared by all templates. Every filter of Jinja2 is wrapped to check the limits, every value that
    a template puts out is checked (`finalize`), and the test `none` is true for NoContent too.
    """
    extensions = [_Generation, LoopControlExtension]
    # Not optimized: constants folded at compile time would escape the limits.
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_bounded
    )
    filters = {name: _limited(function) for name, function in environment.filters.items()}
    environment.filters |= {**filters, "tojson": _limited(_to_json), _TIMED: _timed, _BOUNDED: _bounded}
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format_: datetime.now().strftime(format_),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with limits on time and on the length of values."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _LimitInserter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right` for +, * and **; raise TemplateLimitError if it exceeds a limit.

        The size of a product or a power is estimated first, since the operation itself may take all memory: "ab" * n
        has 2 · n characters, and 10 ** n at most 4 · n bits. A sum is checked afterwards, as both sides are bounded.
        """
        _check_time()
        if operator == "*":
            for value, count in ((left, right), (right, left)):  # Either side may be the number of repetitions.
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    _check_len(len(value) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check_int_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_int_bits(left.bit_length() * right)
        return _bounded_value(super().call_binop(context, operator, left, right))

    def call(self, /, *args: Any, **names: Any) -> Any:
        _check_time()
        return _bounded_value(super().call(*args, **names))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the pieces of text that a template, a macro or a block puts out.

        Raise TemplateRuntimeError as soon as a piece exceeds the limit on length or on time.
        """

        def counted() -> Iterator[str]:
            length = 0
            for piece in pieces:
                _check_len(length := length + len(piece))
                _check_time()
                yield piece

        return "".join(counted())


_TIMED, _BOUNDED = "jpaged timed", "jpaged bounded"
"""Names of our own filters. No template can write them, since a filter's name has no space in it."""


class _LimitInserter(NodeTransformer):
    """Wraps each iterable of a `for` loop in the filter `_TIMED`, and each concatenation of texts in `_BOUNDED`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the name is jinja2's
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _TIMED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(node, _BOUNDED, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _timed(_: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


@jinja2.pass_context
def _bounded(_: Any, value: Any) -> Any:
    return _bounded_value(value)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, a Jinja2 filter, with checks of time and of the size of its arguments and its result.

    `wraps` keeps its attributes, by which Jinja2 knows that a filter takes the context.
    """

    @wraps(function)
    def run(*args: Any, **names: Any) -> Any:
        """Call the filter; raise TemplateLimitError after the render's deadline, or if a value is too large.

        The values are the arguments and the result. A template can write list and dict literals that nest, such as
        `[x, x]`. These are built without any call that checks their size, so arguments are checked before the call.
        """
        _check_time()
        for value in (*args, *names.values()):
            _bounded_value(value)
        result = _bounded_value(function(*args, **names))
        _check_time()
        return result

    return run


_LISTS = (list, tuple)


def _bounded_value(value: Any) -> Any:
    """Return `value` itself; raise TemplateLimitError if it is larger than allowed.

    The size is the number of characters of all texts, plus the entries of all lists, tuples and dictionaries, at any
    depth; the keys of dictionaries do not count. A list that occurs twice counts twice, as it would when it is written
    out. Example: ["ab", {"k": "c"}] has the size 2 + 2 + 1 + 1 = 6.
    """
    length, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, dict):
            length += len(item)
            pending.extend(item.values())
        elif isinstance(item, _LISTS):
            length += len(item)
            pending.extend(item)
        else:
            continue
        _check_len(length)
    return value


def _check_time() -> None:
    if (bounds := _bounds.get(None)) is not None and time.monotonic() > bounds.end_s:
        raise TemplateLimitError(f"it takes more than {bounds.seconds:g} s")


def _check_len(length: int) -> None:
    bounds = _bounds.get(None)
    if length > (max_len := MAX_LEN if bounds is None else bounds.max_len):
        raise TemplateLimitError(f"it makes a text or a list longer than {max_len}")


def _check_int_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INT_BITS} bits")


class _Generation(Extension):
    """The block `{% generation %}` … `{% endgeneration %}`, which marks text written by the model for training.

    Here the block only opens a scope of its own, as in transformers: what is in it is rendered as if the marks were not
    there.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja2's namespace, which refuses names that begin with an underscore.

    With such names a template could make it look like another Python object.
    """

    # No parameter has a name, since a template may use any name, "self" too: args[0] is this object.
    def __init__(*args: Any, **names: Any) -> None:
        for name in (attributes := dict(*args[1:], **names)):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """The callable that a template sees as `dict`: it makes dictionaries, and gives no access to the class itself."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON text, with the options of `json.dumps`; other characters than ASCII stay as they are.

    It replaces Jinja2's filter `tojson`, which would escape `<` for web pages.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)
