"""Renders a chat as text by a Jinja2 template. A template comes with the model or from the user, and is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checks import one_line, refusal, shown
from ...errors import InvalidRequestError
from ..tokenizing.tokenizer import Tokenizer
from .chat_messages import normalize_messages
from .template_fit import fit_to_template
from .template_traits import traits_of
from .tools import ToolSet, template_tools


def readable_arguments(template: str) -> frozenset[str]:
    """Return the variables of a chat template that a request may set, such as `enable_thinking`.

    A variable that the template reads anywhere is one, also in a branch, or only to see whether it is defined; what
    every chat is given is not. None are returned for an empty template and for one that is not valid Jinja2, which
    cannot be rendered.
    """
    import jinja2  # Here, since most requests need no template, and the import takes time.

    from .template_environment import template_arguments

    try:
        return template_arguments(template)
    except jinja2.TemplateSyntaxError:
        return frozenset()


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: ToolSet | None = None,
    arguments: Mapping[str, Any] | None = None,
    max_s: float | None = None,
    max_chars: int | None = None,
) -> str:
    """Return a conversation as text, rendered by `template`; None is the chat template of the tokenizer's model.

    With `tools` that is the model's template for them, if it has one.

    With `add_generation_prompt` the text ends where the model's answer begins. `arguments` are further variables of
    the template, which may take `max_s` seconds and make `max_chars` characters; None is the default of each. The
    text contains its special tokens already, so encode it with `add_special_tokens=False`. Raise InvalidRequestError
    for messages that are malformed or that the template refuses, for an argument that it does not read, and if there
    is no template.
    """
    if template is None and tools is not None:
        template = tokenizer.tool_template
    template = template if template is not None else tokenizer.chat_template
    if template is None:
        way_out = "give one (--chat-template FILE) or send a plain prompt"
        raise InvalidRequestError(f"this model has no chat template; {way_out}", param="messages")
    return render_chat_template(
        template,
        messages,
        special_tokens=tokenizer.special_tokens,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        arguments=arguments,
        max_s=max_s,
        max_chars=max_chars,
    )


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    tools: ToolSet | None = None,
    arguments: Mapping[str, Any] | None = None,
    max_s: float | None = None,
    max_chars: int | None = None,
) -> str:
    """Return the text that a Jinja2 chat template makes of `messages`.

    The template sees the messages as `normalize_messages` writes them, `special_tokens` as variables of these names,
    `add_generation_prompt`, and the variables in `arguments`. Raise InvalidRequestError for malformed messages, for an
    argument that the template does not read, for a template that is not valid Jinja2, for anything that the template
    raises, and for a template that exceeds the limits on time or length.
    """
    conversation = normalize_messages(messages)
    names = {"add_generation_prompt": add_generation_prompt, **special_tokens, **(arguments or {})}
    import jinja2

    from .template_environment import compile_template, render, template_arguments

    try:
        for name in arguments or ():
            if name not in (known := template_arguments(template)):
                allowed = f"what the chat template reads: {', '.join(sorted(known)) or 'nothing'}"
                raise refusal("chat_template_kwargs", shown(name), allowed, "leave it out")
        compile_template(template)
        traits = traits_of(template, special_tokens)
        conversation = fit_to_template(conversation, traits, tools)
        seen_tools = None if tools is None else template_tools(tools, is_full=traits.needs_full_tools)
        variables = {**names, "messages": conversation, "tools": seen_tools, "documents": None}
        return render(template, variables, max_s=max_s, max_chars=max_chars)
    except jinja2.TemplateSyntaxError as error:
        fault = f"is not valid Jinja2: line {error.lineno}: {one_line(error.message)}"
        raise InvalidRequestError(f"the chat template {fault}; correct it", param="messages") from error
    except InvalidRequestError:
        raise
    except Exception as error:  # A template is a program: it may raise anything.
        fault = f"the chat template refuses these messages: {_told(error, template)}"
        raise InvalidRequestError(f"{fault}; change the messages or the template", param="messages") from error


def has_exceeded_limits(error: InvalidRequestError) -> bool:
    """Return whether `render_chat_template` has raised this error because of its limits on time or length."""
    from .template_environment import TemplateLimitError

    return isinstance(error.__cause__, TemplateLimitError)


def _told(error: Exception, template: str) -> str:
    """Return what a template's failure is told as, without what it may quote of the messages.

    A text that the template raises is told as far as it stands in the template; of other errors, the type is told. The
    limits of `template_environment` are told as they are.
    """
    from .template_environment import TemplateLimitError, TemplateRefusal, texts_of

    message = str(error)
    if isinstance(error, TemplateRefusal):
        own = max((text for text in texts_of(template) if message.startswith(text)), key=len, default="")
        return one_line(own if own == message else f"{own}…")
    return one_line(message) if isinstance(error, TemplateLimitError) else type(error).__name__
