"""Reads the chat template that a flag names."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError


def read_template(path: str) -> str:
    """Return the text of the chat template in the file `path`.

    It is compiled to find errors before a model is loaded, and the result is dropped. Raises ConfigError if `path` is
    no readable UTF-8 file, or no valid Jinja2; then the message names the line.
    """
    import jinja2

    from ..text.chat.template_environment import compile_template

    try:
        text = Path(path).read_text(encoding="utf-8")
        compile_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path!r} cannot be read ({error}); give a readable UTF-8 file") from error
    except jinja2.TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {error.message}"
        raise ConfigError(f"--chat-template: {path} is no valid Jinja2, {fault}") from error
    return text
