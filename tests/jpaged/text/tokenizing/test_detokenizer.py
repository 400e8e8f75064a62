"""A stream of tokens gives the text of all tokens, piece by piece, and ends at stop strings."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.outputs import Mark
from jpaged.text.tokenizing.detokenizer import Detokenizer
from jpaged.text.tokenizing.tokenizer import Tokenizer

from .published_tokenizers import (
    MOST_FAMILIES,
    PIECES,
    TEXTS,
    byte_tokenizer,
    load_family,
    load_smollm2,
    sentence_piece_tokenizer,
)

BROKEN = "\ufffd"
END = 256


def stream(detokenizer, token_ids):
    """Append one token at a time; return the deltas, each checked against the text so far."""
    deltas = []
    for token_id in token_ids:
        stop = detokenizer.append([token_id])
        deltas.append(detokenizer.delta())
        assert detokenizer.text.startswith("".join(deltas))
        if stop is not None:
            break
    deltas.append(detokenizer.delta(finished=True))
    assert "".join(deltas) == detokenizer.text
    return deltas


def run(tokenizer, prompt, output, **options):
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    stream(detokenizer, output)
    return detokenizer


# The output's text is what decode makes of prompt and output together, without what it makes of the prompt.


def check_against_decode(tokenizer, prompt, output, skip):
    """Compare the streamed text with what `Tokenizer.decode` gives; both cases left out have tests of their own."""
    text = run(tokenizer, prompt, output, skip_special_tokens=skip).text
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode([*prompt, *output], skip)
    if before.endswith(BROKEN):
        return  # The prompt ends within a character.
    if tokenizer.has_byte_fallback and BROKEN in whole:
        return  # One bad byte makes SentencePiece's decoder drop the good characters beside it.
    assert text == whole[len(before) :]


@pytest.mark.parametrize("family", MOST_FAMILIES)
def test_text_of_random_tokens_is_what_decode_makes_of_them(family):
    tokenizer, rng = load_family(family), random.Random(family)
    for _ in range(400):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(1, 12))]
        cut = rng.choice([0, rng.randrange(len(ids))])
        check_against_decode(tokenizer, ids[:cut], ids[cut:], skip=rng.random() < 0.5)


@pytest.mark.parametrize("family", MOST_FAMILIES)
def test_real_text_in_any_script_streams_as_it_is_decoded(family):
    tokenizer, rng = load_family(family), random.Random(family)
    for text in TEXTS.values():
        ids = tokenizer.encode(text)
        for cut in {0, len(ids) // 2, rng.randrange(len(ids) + 1)}:
            for skip in (True, False):
                check_against_decode(tokenizer, ids[:cut], ids[cut:], skip)
        assert run(tokenizer, [], ids).text == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, END + 2), max_size=12), st.integers(0, 12), st.booleans())
def test_any_bytes_stream_as_they_are_decoded(ids, cut, skip):
    check_against_decode(byte_tokenizer(), ids[:cut], ids[cut:], skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(PIECES)), max_size=12), st.integers(0, 12), st.booleans())
def test_any_pieces_stream_as_they_are_decoded(ids, cut, skip):
    check_against_decode(sentence_piece_tokenizer(), ids[:cut], ids[cut:], skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.integers(1, 5))
def test_several_tokens_at_once_give_the_text_of_one_by_one(text, chunk_len):
    ids = list(text.encode())
    detokenizer = Detokenizer(byte_tokenizer(), [])
    for start in range(0, len(ids), chunk_len):
        detokenizer.append(ids[start : start + chunk_len])
    detokenizer.finish()
    assert detokenizer.text == text


# Marks: where the tokens stand of which a reader must know the id.


def with_ends(text, marks):
    """Return a text with the special token <end> written at its marks."""
    for mark in reversed(marks):
        if mark.token_id == END:
            text = text[: mark.place] + "<end>" + text[mark.place :]
    return text


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "<", "€", "<end>"]), max_size=12),
    st.lists(st.sampled_from(["a", "b<", "<a", "€"]), max_size=2),
    st.booleans(),
)
def test_marks_come_with_the_text_in_which_their_tokens_stand(pieces, stop, include):
    """Those of <end>, which the text leaves out, and of "<", which it shows; a stop string takes those in it along."""
    options = {"stop": stop, "include_stop_str_in_output": include}
    detokenizer = Detokenizer(byte_tokenizer(), [], mark_ids=frozenset([END, ord("<")]), **options)
    text, marks, shown = "", [], ""
    for token_id in [*byte_tokenizer().encode("".join(pieces)), None]:
        is_over = token_id is None or detokenizer.append([token_id]) is not None
        delta = detokenizer.delta(finished=is_over)
        new = [Mark(mark.place - len(text), mark.token_id) for mark in detokenizer.marks(len(marks), len(text + delta))]
        assert all(delta[mark.place] == "<" if mark.token_id == ord("<") else True for mark in new)
        text, marks, shown = text + delta, [*marks, *new], shown + with_ends(delta, new)
        if is_over:
            break
    whole = detokenizer.marks(0, len(text))
    assert [mark.token_id for mark in marks] == [mark.token_id for mark in whole]
    assert shown == with_ends(text, whole)
    assert [mark.place for mark in whole if mark.token_id != END] == [at for at, char in enumerate(text) if char == "<"]
    if not detokenizer.stop_string:
        assert shown == "".join(pieces)


# Characters that are spread over tokens.


@pytest.mark.parametrize("family", MOST_FAMILIES)
def test_no_delta_shows_half_a_character(family):
    tokenizer = load_family(family)
    for text in TEXTS.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert BROKEN not in "".join(stream(Detokenizer(tokenizer, []), ids))


def test_character_comes_out_with_its_last_byte():
    detokenizer = Detokenizer(byte_tokenizer(), [])
    assert [detokenizer.append([byte]) or detokenizer.delta() for byte in "a🦙".encode()] == ["a", "", "", "", "🦙"]


def test_unfinished_character_shows_only_when_the_sequence_ends():
    detokenizer = Detokenizer(byte_tokenizer(), [])
    detokenizer.append(list("a🦙".encode()[:-1]))
    assert (detokenizer.delta(), detokenizer.text) == ("a", "a")
    assert detokenizer.delta(finished=True) == BROKEN
    assert detokenizer.text == "a" + BROKEN == byte_tokenizer().decode(list("a🦙".encode()[:-1]))


def test_bad_byte_does_not_hold_back_what_follows():
    assert stream(Detokenizer(byte_tokenizer(), []), [0xFF, ord("a"), 0xE4, ord("b")]) == [
        BROKEN,
        "a",
        "",
        BROKEN + "b",
        "",
    ]


def test_good_characters_stand_beside_a_bad_byte_token():
    """Only in this case `decode` gives less text: it turns the whole run of byte tokens into U+FFFD."""
    tokenizer = sentence_piece_tokenizer()
    ids = [3 + byte for byte in "你".encode()] + [3 + 0xFF]
    assert tokenizer.decode(ids) == BROKEN * 4
    assert run(tokenizer, [], ids).text == "你" + BROKEN


def test_a_character_that_the_prompt_begins_comes_out_once_the_output_completes_it():
    prompt, rest = list("so, 你".encode()[:-1]), "你".encode()[-1]
    assert stream(Detokenizer(byte_tokenizer(), prompt), [rest, ord("!")]) == ["你", "!", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_only_the_prompt_began_is_no_part_of_the_output(num_bytes):
    prompt = list("so, 🦙".encode()[: 4 + num_bytes])
    assert run(byte_tokenizer(), prompt, list(b"ok")).text == "ok"
    assert run(byte_tokenizer(), prompt, list("你".encode())).text == "你"
    assert run(byte_tokenizer(), prompt, []).text == ""


# Spaces and special tokens.


def test_first_space_of_sentence_piece_is_dropped_only_without_a_prompt():
    tokenizer = sentence_piece_tokenizer()
    ids = [PIECES.index("▁a"), PIECES.index("▁b")]
    assert run(tokenizer, [], ids).text == "a b"
    assert run(tokenizer, ids, ids).text == " a b"
    assert run(tokenizer, [1], ids).text == "a b", "a hidden <s> is no text"
    assert run(tokenizer, [1], ids, skip_special_tokens=False).text == " a b"


def test_llama_2_keeps_the_space_before_its_first_word():
    tokenizer = load_family("llama2")
    prompt, output = tokenizer.encode("The capital of France is"), tokenizer.encode("Paris.", add_special_tokens=False)
    assert run(tokenizer, prompt, output).text == " Paris."


def test_the_space_between_two_special_tokens_is_written_or_left_out():
    """The tokenizer's decoder puts a space before each token; the space before an ordinary token always stays."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, "a"))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(backend, {})
    ids = [0, 3, 2, 2, 1, 2, 0]

    def text(**options):
        return run(tokenizer, [], ids, **options).text

    assert text(skip_special_tokens=False) == "a </s> <s> <s> b <s> a"
    assert text(skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == "a </s><s><s> b <s> a"
    assert text(spaces_between_special_tokens=False) == text() == "a b a"


# Stop strings.


def expected(text, stops, include, min_tokens=0):
    """Return text and stop string, found by trying every end in turn; each character is one token."""
    for end in range(min_tokens + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


few_letters = st.text("ab", max_size=16)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(max_examples=500, deadline=None)
@given(few_letters, stop_lists, st.booleans(), st.integers(0, 6), st.integers(1, 4))
def test_earliest_stop_string_ends_the_text(text, stops, include, min_tokens, chunk_len):
    options = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    detokenizer = Detokenizer(byte_tokenizer(), [], **options)
    found = None
    for start in range(0, len(text), chunk_len):
        found = detokenizer.append(list(text[start : start + chunk_len].encode()))
        if found is not None:
            break
    detokenizer.finish()
    assert (detokenizer.text, found) == expected(text, stops, include, min_tokens)
    assert detokenizer.stop_string == found


@settings(max_examples=500, deadline=None)
@given(few_letters, stop_lists, st.integers(0, 6))
def test_held_back_text_is_the_longest_possible_beginning_of_a_stop_string(text, stops, min_tokens):
    """Holding back less would show a part of a stop string, holding back more would be late."""
    detokenizer = Detokenizer(byte_tokenizer(), [], stop=stops, min_tokens=min_tokens)
    shown = ""
    for char in text:
        stop = detokenizer.append([ord(char)])
        shown += detokenizer.delta()
        if stop is not None:
            assert shown == detokenizer.text
            return
        so_far = detokenizer.text
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(part) for part in beginnings if so_far.endswith(part)), default=0)
        assert shown == so_far[: len(so_far) - held]
    assert shown + detokenizer.delta(finished=True) == text


def test_stop_string_across_tokens_and_within_one():
    tokenizer = load_smollm2()
    ids = tokenizer.encode("First line.\n\nUser: and more")
    detokenizer = Detokenizer(tokenizer, [1], stop=["\n\nUs"])
    assert "".join(stream(detokenizer, ids)) == "First line."
    assert detokenizer.stop_string == "\n\nUs"
    assert run(tokenizer, [1], ids, stop=["\n\nUs"], include_stop_str_in_output=True).text == "First line.\n\nUs"


def test_tokens_after_the_stop_are_not_added():
    detokenizer = Detokenizer(byte_tokenizer(), [], stop=["b"])
    assert detokenizer.append(list(b"abcd")) == "b"
    assert (detokenizer.num_tokens, detokenizer.text) == (2, "a")


def test_stop_string_is_not_completed_by_the_prompt():
    assert run(byte_tokenizer(), list(b"EN"), list(b"D!"), stop=["END"]).text == "D!"


class CountingText(str):
    """A string that counts how often one of its characters is read."""

    num_reads = 0

    def __getitem__(self, place):
        self.num_reads += 1
        return super().__getitem__(place)


def test_a_hostile_stop_string_costs_linear_time():
    stop = CountingText("a" * 500 + "b")
    detokenizer = Detokenizer(byte_tokenizer(), [], stop=[stop])
    for _ in range(2_000):
        detokenizer.append([ord("a")])
        detokenizer.delta()
    assert stop.num_reads < 4 * (len(stop) + 2_000), "a quadratic search reads a million characters"
