"""The tree of errors that a caller can catch by."""

import pytest

from jpaged import errors
from jpaged.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    JpagedError,
    ModelLoadError,
    QueueFullError,
)


def test_a_full_queue_says_which_limit_what_was_given_and_what_to_do():
    error = QueueFullError("waiting_tokens", got=201, allowed=200)
    assert str(error) == (
        "waiting_tokens: got 201 with this request, allowed: 200; try again later, or start the engine with a higher "
        "waiting_tokens among its limits"
    )
    assert error.limit == "waiting_tokens"


def test_a_full_queue_is_not_taken_for_a_wrong_request():
    """A server that answers a wrong request with "do not send that again" must not say so of a full queue."""
    assert not issubclass(QueueFullError, InvalidRequestError | ConfigError)
    assert issubclass(QueueFullError, JpagedError)


@pytest.mark.parametrize(
    "error", [ConfigError, ContextLengthError, InvalidRequestError, QueueFullError, ModelLoadError]
)
def test_every_error_is_a_value_error_that_the_tree_in_the_docstring_names(error):
    assert issubclass(error, ValueError)
    assert error.__name__ in errors.__doc__
    assert error.__name__ in errors.__all__


def test_a_place_in_front_keeps_the_kind_of_an_error():
    told = "your prompt has 130 tokens"
    error = ContextLengthError.of(128, told, "shorten it", param="messages", num_prompt_tokens=130).within("prompt 3")
    assert str(error) == (
        "prompt 3: This model's maximum context length is 128 tokens, but your prompt has 130 tokens; "
        "the prompt is too long, shorten it"
    )
    assert (type(error), error.param, error.code) == (ContextLengthError, "messages", "context_length_exceeded")
    assert error.num_prompt_tokens == 130, "protocols tell it in words of their own"
    assert JpagedError.code is None
