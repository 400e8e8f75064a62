"""Jinja2 as chat templates know it: Hugging Face's conventions, in Jinja2's sandbox, for templates that nobody trusts.

Imported at the first use. transformers has the same environment; importing it would take a good part of a start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


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
