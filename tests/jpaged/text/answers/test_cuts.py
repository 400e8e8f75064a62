"""An output that comes in pieces gives the events of the whole one, whatever the model has written."""

import json

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jpaged.messages import AnswerSpec
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.events import CallArguments, CallEnd, CallStart
from jpaged.text.answers.format_names import answer_format
from jpaged.text.answers.scanner import AnswerScanner
from jpaged.text.answers.whole_answer import joined_events, parse_answer

from .written_answers import NAMES, TOOLS, as_tokens, broken_answers, loaded, pieces_of, whole_answers

CUTS = st.lists(st.integers(0, 10**6), max_size=12)
PHASES = (Phase.explicit, Phase.generate)  # Making a failing answer shorter takes minutes.
NUM_CUTS = 4
"""Ways in which each answer is cut."""


def _spec(name):
    return AnswerSpec(tools=TOOLS, opening="<|start|>assistant" if name == "openai" else "")


def _check_order(events):
    """Check that each call's events stand together, in order, and that its arguments are an object."""
    index, arguments = -1, None
    for event in events:
        if isinstance(event, CallStart):
            assert arguments is None
            index, arguments = index + 1, ""
            assert event.index == index
        elif isinstance(event, CallArguments):
            assert event.index == index
            arguments += event.text
        elif isinstance(event, CallEnd):
            assert event.index == index
            assert isinstance(json.loads(arguments), dict)
            arguments = None
        else:
            assert arguments is None
            assert event.text
    assert arguments is None


def _check_cuts(name, text, data):
    """Check a text in pieces, its marks as text and as tokens; return the answer of each."""
    spec = _spec(name)
    tokens, shown, marks = as_tokens(text, name, data.draw(st.integers(0, 4)))
    written = (bind_marks(answer_format(name, NAMES[name]), {}), text, [])
    as_ids = (tokens, shown, marks)
    wholes = [parse_answer(own_text, format, spec, own_marks) for format, own_text, own_marks in (written, as_ids)]
    for _ in range(NUM_CUTS):
        cuts = data.draw(CUTS)
        for (format, own_text, own_marks), whole in zip((written, as_ids), wholes, strict=True):
            scanner = AnswerScanner(format, spec)
            events = [
                event
                for piece, piece_marks in pieces_of(own_text, own_marks, cuts, format.special_ids)
                for event in scanner.feed(piece, piece_marks)
            ] + scanner.finish()
            _check_order(events)
            assert joined_events(events) == whole
    return wholes


def _check_whole_answers(name, max_examples):
    @settings(max_examples=max_examples, deadline=None, phases=PHASES)
    @given(whole_answers(name), st.data())
    def check(written, data):
        answer, from_tokens = _check_cuts(name, written.text, data)
        assert from_tokens == answer
        assert loaded(answer.tool_calls) == written.calls
        assert (answer.reasoning or "") == written.thought.strip(" \n")
        assert answer.content.strip(" \n") == written.content.strip(" \n")

    check()


def _check_broken_answers(name, max_examples):
    @settings(max_examples=max_examples, deadline=None, phases=PHASES)
    @given(broken_answers(name), st.data())
    def check(text, data):
        _check_cuts(name, text, data)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_whole_answers(name):
    _check_whole_answers(name, max_examples=12)


@pytest.mark.parametrize("name", NAMES)
def test_broken_answers(name):
    _check_broken_answers(name, max_examples=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_cuts(name):
    """Two kinds of answers in seven formats, each answer cut in four ways."""
    _check_whole_answers(name, max_examples=180)
    _check_broken_answers(name, max_examples=180)
