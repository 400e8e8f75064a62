"""Jinja2 as chat templates know it: Hugging Face's conventions, in Jinja2's sandbox, for templates that nobody trusts.

A template has so much time and may make so much text. That is looked at wherever a loop turns, a function or a filter
is called, texts are joined or put out: one call that takes long, or makes much, is found behind it. Imported at the
first use. transformers has the same environment, without limits; importing it would take a good part of a start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 30.0
MAX_LEN = 8 << 20
"""Characters of a text that a template makes, the whole chat among them, and entries of a list, with theirs."""
MAX_BITS = 1 << 16
"""Of a number."""

_deadline: ContextVar[float] = ContextVar("_deadline")
"""By time.monotonic(): when whoever renders here has to be done."""


def render(template: str, **names: Any) -> str:
    """What the template makes of these names. Raises jinja2.TemplateSyntaxError, whatever the template raises, and
    jinja2.TemplateRuntimeError for one that takes RENDER_S or makes MAX_LEN."""
    compiled = compile_template(template)
    before = _deadline.set(time.monotonic() + RENDER_S)
    try:
        return compiled.render(**names)
    finally:
        _deadline.reset(before)


@lru_cache(maxsize=64)
def compile_template(template: str) -> jinja2.Template:
    """The template, ready to be rendered as often as needed. Raises jinja2.TemplateSyntaxError."""
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError:
        raise
    except Exception as error:  # Python's own limits: how deep blocks and brackets may nest.
        raise jinja2.TemplateSyntaxError(f"Python cannot compile it: {error}", lineno=1) from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControlExtension],
        optimized=False,  # What it would compute as it compiles has no limits.
        finalize=_bounded,
    )
    filters = {name: _limited(function) for name, function in environment.filters.items()}
    environment.filters |= {**filters, "tojson": _limited(_to_json), _WATCHED: _watched, _BOUNDED: _bounded}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox with limits, in time and in length."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watcher().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    _check_len(len(value) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        return _bounded_value(super().call_binop(context, operator, left, right))

    def call(self, /, *args: Any, **names: Any) -> Any:
        _check_time()
        return _bounded_value(super().call(*args, **names))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Of a whole rendered text, of a macro, of a block that is set."""

        def counted() -> Iterator[str]:
            length = 0
            for piece in pieces:
                _check_len(length := length + len(piece))
                _check_time()
                yield piece

        return "".join(counted())


_WATCHED, _BOUNDED = "jpaged watched", "jpaged bounded"
"""Filters that no template can name."""


class _Watcher(NodeTransformer):
    """Puts them around what a loop goes over, and around texts that are joined."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as jinja2 calls it
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _WATCHED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(node, _BOUNDED, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _watched(_: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


@jinja2.pass_context
def _bounded(_: Any, value: Any) -> Any:
    return _bounded_value(value)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **names: Any) -> Any:
        _check_time()
        for value in args:
            _bounded_value(value)
        result = _bounded_value(function(*args, **names))
        _check_time()
        return result

    return run


def _bounded_value(value: Any) -> Any:
    """The value, unless it is too long as it is, or written out: a list that holds another twice is as long as two."""
    length, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            length += len(one)
        elif isinstance(one, list | tuple):
            length += len(one)
            left.extend(one)
        elif isinstance(one, dict):
            length += len(one)
            left.extend(one.values())
        _check_len(length)
    return value


def _check_time() -> None:
    if time.monotonic() > _deadline.get(float("inf")):
        raise jinja2.TemplateRuntimeError(f"it takes more than {RENDER_S:g} s")


def _check_len(length: int) -> None:
    if length > MAX_LEN:
        raise jinja2.TemplateRuntimeError(f"it makes a text or a list of more than {MAX_LEN}")


def _check_bits(count: int) -> None:
    if count > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"it makes a number of more than {MAX_BITS} bits")


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what a model has written, for those who train one: here, only a
    scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja2's, but for names that begin with an underscore: a template could pose as a Python object by them."""

    def __init__(*args: Any, **names: Any) -> None:
        for name in (attributes := dict(*args[1:], **names)):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """What a template sees as `dict`: how to make one, and no class to climb from."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name that begins with an underscore, got {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own would write `<` as an escape, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
