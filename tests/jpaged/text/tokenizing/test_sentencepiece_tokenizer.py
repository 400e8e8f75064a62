"""A directory whose vocabulary is a file of SentencePiece has the ids and the text of the package sentencepiece."""

import io
import itertools
import json
import random
import sys
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from jpaged.errors import ModelLoadError
from jpaged.text.grammar.grammar import Grammars
from jpaged.text.tokenizing.detokenizer import Detokenizer
from jpaged.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

from ..grammar.grammar_walks import grammars_of, random_output

SENTENCES = [
    *(Path(__file__).parents[4] / "scripts" / "bench" / "shakespeare.txt").read_text().splitlines()[:300],
    *["世界 漢字かな交じり ガギグ、", "Ｆｕｌｌ ｗｉｄｔｈ ｶﾞｷﾞ ①② ﬁne", "é e\u0301 ñ Ünïcödé", "нет нещо ёж не те"] * 3,
    *["    indented\tcode(x)", "abab aaaa aab abba ab aa b", "1603 and 12 34 or 5", "to be, to be"] * 3,
]
"""What models are trained on here, which takes some hundredths of a second."""
WRITTEN = [
    "", " ", "   ", "\n", "\t", " \n ", "▁", " ▁ ▁", "\x00", "\u200b", " a", "a ", "  a  b  ", "ab" * 200, "a" * 500,
    " " * 99 + "a", "☃" * 9, "☃a☃ ☃", "e\u0301\u0301", "\u0301a", "ｶﾞｷﾞ", "I don't\nknow.\n\n\n", "user users usus",
]  # fmt: skip
PIECES = [
    "the", " the", " be", "to", "  ", " ", "\n", "\t", "\r\n", "ab", "aa", "a", "b", "▁", "▁▁", "<0x41>", "世界", "漢",
    "ｶﾞ", "ｶ", "é", "e\u0301", "\u0301", "①", "ﬁ", "\u200b", "\ufeff", "\u00a0", "\u3000", "\x00", "\x7f", "☃", "🦙",
    "</", "<un", "12", "3", "нет", "THE", "That", "user", "users", "us", "er", "Ｆ", "\u2028", "ß", "<turn",
]  # fmt: skip
SCRIPTS = [
    *[range(0x20, 0x7F)] * 4, range(0x20), range(0x7F, 0x250), range(0x300, 0x370), range(0x370, 0x530),
    range(0x590, 0x700), range(0x900, 0x980), range(0xE00, 0xE80), range(0x1100, 0x1200), range(0x2000, 0x2070),
    range(0x2150, 0x2190), range(0x2460, 0x2500), range(0x3000, 0x3100), range(0x4E00, 0x4F00), range(0xAC00, 0xAD00),
    range(0xF900, 0xFB50), range(0xFF00, 0xFFF0), range(0x1D400, 0x1D500), range(0x1F600, 0x1F650),
]  # fmt: skip
TYPES = {
    "unigram": {"vocab_size": 400},
    "bpe": {"vocab_size": 400},
    "word": {"vocab_size": 300},
    "char": {"vocab_size": 150, "hard_vocab_limit": False},
}
BARE = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}
WITH_BYTES = {"byte_fallback": True, "vocab_size": 660}
WITH_OWN = {"user_defined_symbols": ["user", "us", " be"], "control_symbols": ["<turn>"]}
VARIANTS = {
    **{name: (name, {}) for name in TYPES},
    **{f"{name}, bare": (name, BARE) for name in TYPES},
    "unigram, byte fallback": ("unigram", WITH_BYTES),
    "unigram, byte fallback, bare": ("unigram", WITH_BYTES | BARE),
    "bpe, byte fallback, as Llama 2": ("bpe", WITH_BYTES | BARE | {"add_dummy_prefix": True}),
    "bpe, byte fallback, as Gemma": ("bpe", WITH_BYTES | BARE | {"split_digits": True}),
    "unigram, case folded": ("unigram", {"normalization_rule_name": "nmt_nfkc_cf"}),
    "bpe, NFKC with all spaces": ("bpe", {"normalization_rule_name": "nfkc", "remove_extra_whitespaces": False}),
    "bpe, no prefix": ("bpe", {"add_dummy_prefix": False}),
    "bpe, pieces of its own": ("bpe", WITH_OWN),
    "unigram, pieces of its own": ("unigram", WITH_OWN | BARE),
    "unigram, pieces across spaces": ("unigram", {"split_by_whitespace": False}),
}
NORMALIZERS = ("identity", "nmt_nfkc", "nfkc", "nfkc_cf", "nmt_nfkc_cf")
EXHAUSTIVE = list(itertools.product(TYPES, NORMALIZERS, *[(False, True)] * 4))
SPECIAL = ("<unk>", "<s>", "</s>", "<turn>")


def train(kind="bpe", **options):
    """Return the file of a model that is trained on SENTENCES, as bytes."""
    file = io.BytesIO()
    options = {"model_type": kind, "minloglevel": 2, **TYPES[kind], **options}
    SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=file, **options)
    return file.getvalue()


def edited(**options):
    """Return the message of a trained model, to be changed."""
    return ModelProto.FromString(train(**options))


def load(folder, model, *, config=None, name="tokenizer.model", **options):
    """Return the tokenizer of a directory with the file `model` and the `options` of tokenizer_config.json."""
    (folder / name).write_bytes(model)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return load_tokenizer(folder)


def texts(seed, num_texts):
    """Return WRITTEN and `num_texts` random texts, joins of PIECES or of characters, without special tokens."""
    rng = random.Random(seed)
    found = list(WRITTEN)
    while len(found) < len(WRITTEN) + num_texts:
        num_parts = rng.randint(1, 40)
        if rng.random() < 0.6:
            text = "".join(rng.choices(PIECES, k=num_parts))
        else:
            text = "".join(chr(rng.choice(rng.choice(SCRIPTS))) for _ in range(num_parts))
        if not any(token in text for token in SPECIAL):
            found.append(text)
    return found


def check_texts(tokenizer, model, num_texts, seed=0):
    """Compare ids of texts, and the text of these ids without unknown ones, whole and as it streams."""
    processor = SentencePieceProcessor(model_proto=model)
    for text in texts(seed, num_texts):
        ids = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.encode(text) == [1, *ids]
        known = [token_id for token_id in ids if not processor.is_unknown(token_id)]
        decoded = tokenizer.decode(known)
        # Of several spaces in front, which only ▁ in the text itself makes, sentencepiece may drop more than one.
        if not "".join(processor.id_to_piece(known)).startswith("▁▁"):
            assert decoded == processor.decode(known), repr(text)
        detokenizer = Detokenizer(tokenizer, [])
        detokenizer.append(known)
        assert detokenizer.delta(finished=True) == decoded


@pytest.mark.parametrize(("kind", "options"), VARIANTS.values(), ids=VARIANTS.keys())
def test_ids_and_text_are_those_of_sentencepiece(tmp_path, kind, options):
    model = train(kind, **options)
    check_texts(load(tmp_path, model), model, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_ids_and_text_are_those_of_sentencepiece_for_every_pair_of_options(tmp_path, kind):
    for seed, (other, normalizer, prefix, strips, falls_back, has_own) in enumerate(EXHAUSTIVE):
        if other != kind or (falls_back and kind in ("word", "char")):
            continue
        options = {
            "normalization_rule_name": normalizer, "add_dummy_prefix": prefix, "remove_extra_whitespaces": strips,
            **(WITH_BYTES if falls_back else {}), **(WITH_OWN if has_own else {}),
        }  # fmt: skip
        model = train(kind, **options)
        check_texts(load(tmp_path, model), model, 400, seed)


def test_text_streams_where_no_letter_is_a_token(tmp_path):
    file = io.BytesIO()
    sentences = iter(["der König und die Königin", "und der Narr"])
    SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=file, model_type="word", vocab_size=9, minloglevel=2
    )
    check_texts(load(tmp_path, file.getvalue()), file.getvalue(), 0)
    detokenizer = Detokenizer(load_tokenizer(tmp_path), [1])
    detokenizer.append(SentencePieceProcessor(model_proto=file.getvalue()).encode("der Narr und die Königin"))
    assert detokenizer.delta(finished=True) == "der Narr und die Königin"


def test_special_tokens_are_found_in_a_text_and_each_text_between_them_is_one_of_its_own(tmp_path):
    model = train(control_symbols=["<turn>"])
    tokenizer, processor = load(tmp_path, model), SentencePieceProcessor(model_proto=model)
    end, turn = processor.eos_id(), processor.piece_to_id("<turn>")
    text = "the end</s><turn> to be<unk>"
    wanted = [1, *processor.encode("the end"), end, turn, *processor.encode(" to be"), 0]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == "the end to be"
    assert tokenizer.special_ids == {0, 1, end, turn}
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


PREFIXES = {
    "as the file says": ({}, ["▁be", "▁be", "▁▁be"]),
    "null": ({"add_prefix_space": None, "legacy": None}, ["▁be", "▁be", "▁▁be"]),
    "not legacy": ({"legacy": False}, ["▁be", "be", "▁be"]),
    "none": ({"add_prefix_space": False}, ["be", "be", "▁be"]),
    "none, not legacy": ({"add_prefix_space": False, "legacy": False}, ["be", "be", "▁be"]),
}


@pytest.mark.parametrize(("options", "wanted"), PREFIXES.values(), ids=PREFIXES.keys())
def test_options_say_before_which_texts_a_space_is_put(tmp_path, options, wanted):
    model = train(**BARE | {"add_dummy_prefix": True})
    tokenizer = load(tmp_path, model, tokenizer_class="LlamaTokenizer", **options)
    tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("be</s>be</s> be", add_special_tokens=False)]
    assert "".join(tokens).split("</s>") == wanted


def test_a_space_is_put_before_a_text_if_an_option_says_so_and_the_file_does_not(tmp_path):
    tokenizer = load(tmp_path, train(**BARE), tokenizer_class="LlamaTokenizer", add_prefix_space=True)
    assert tokenizer.encode("be") == [1, *SentencePieceProcessor(model_proto=train(**BARE)).encode(" be")]
    assert tokenizer.decode(tokenizer.encode("be")) == "be"


def test_the_class_says_whether_bos_and_eos_are_added_and_the_file_which_they_are(tmp_path):
    model = train(bos_piece="<bos>", eos_piece="<eos>", pad_id=3, pad_piece="<pad>")
    ids = SentencePieceProcessor(model_proto=model).encode("to be")
    tokenizer = load(tmp_path, model, add_eos_token=True)
    assert tokenizer.encode("to be") == [1, *ids, 2]
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    tokenizer = load(tmp_path, model, config={"model_type": "unheard of"}, add_eos_token=False)
    assert (tokenizer.encode("to be"), tokenizer.bos_token_id, tokenizer.eos_token_id) == (ids, 1, 2)


def test_declared_tokens_take_the_places_of_pieces_or_follow_them(tmp_path):
    model = train(control_symbols=["<kept 1>", "<kept 2>"])
    declared = {
        "4": {"content": "<turn>", "special": True},
        "400": {"content": "<new>", "special": False, "normalized": False},
    }
    tokenizer, processor = (
        load(tmp_path, model, added_tokens_decoder=declared),
        SentencePieceProcessor(model_proto=model),
    )
    assert tokenizer.encode("<turn>be<new>") == [1, 4, *processor.encode("be"), 400]
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.decode([4, 400], skip_special_tokens=False) == "<turn><new>"


@pytest.mark.parametrize("declared", [{"a": "<x>"}, {"4": {"special": True}}, {"4": None}, ["<x>"]])
def test_declared_tokens_of_another_form_are_refused_in_one_line(tmp_path, declared):
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: added_tokens_decoder is .*wanted an object"):
        load(tmp_path, train(), added_tokens_decoder=declared)


def test_marks_of_turns_are_special_though_gemma_declares_them_as_text(tmp_path):
    model = train(**BARE | {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "<b>"]})
    tokenizer, processor = load(tmp_path, model), SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode("<start_of_turn>be<b>") == [1, *processor.encode("<start_of_turn>be<b>")]
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_t5_has_a_file_of_another_name_an_end_and_extra_tokens(tmp_path):
    model = train("unigram")
    ids = SentencePieceProcessor(model_proto=model).encode("to be")
    tokenizer = load(tmp_path, model, config={"model_type": "t5"}, name="spiece.model")
    assert tokenizer.encode("<extra_id_0>to be<extra_id_99>") == [499, *ids, 400, 2]
    tokenizer = load(tmp_path, model, name="spiece.model", tokenizer_class="T5Tokenizer", extra_ids=0)
    assert (tokenizer.encode("to be"), tokenizer.vocab_size) == ([*ids, 2], 400)


def test_a_tokenizer_is_whole_again_in_another_process(tmp_path):
    model = train("unigram", **WITH_BYTES)
    tokenizer = load(tmp_path, model, legacy=False, added_tokens_decoder={"660": {"content": "<new>"}})
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    other = Tokenizer(backend, tokenizer.special_tokens, sentence_pieces=tokenizer.sentence_pieces)
    for text in ["to be</s>or not\n<new>☃", *texts(1, 20)]:
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("options", [WITH_BYTES, WITH_BYTES | BARE], ids=["NFKC", "bare"])
def test_outputs_follow_a_grammar(tmp_path, options):
    tokenizer, choices = load(tmp_path, train("unigram", **options)), ["日本 be", "é  ①", " the  the"]
    num_rows = tokenizer.vocab_size + 60  # A model's embedding may be padded.
    grammars, found = Grammars(tokenizer, num_rows, {2}), set()
    for seed in range(20):
        output, is_over = random_output(grammars, 2, seed, choice=choices, token_bytes=tokenizer.token_bytes)
        assert is_over
        found.add(output.decode())
    assert found == set(choices)


def test_tokens_that_a_grammar_forces_are_those_of_the_text_behind_another(tmp_path):
    message = edited(kind="bpe", **WITH_BYTES | BARE | {"add_dummy_prefix": True})
    tokenizer, tokens = load(tmp_path, message.SerializeToString()), []
    message.normalizer_spec.add_dummy_prefix = False
    wanted = SentencePieceProcessor(model_proto=message.SerializeToString()).encode("Speak, citizens.")

    def token_bytes(token_id):
        tokens.append(token_id)
        return tokenizer.token_bytes(token_id)

    random_output(grammars_of(tokenizer), 2, 0, choice=["Speak, citizens."], token_bytes=token_bytes)
    assert tokens == wanted


def without(part):
    message = edited()
    message.ClearField(part)
    return message.SerializeToString()


def denormalized():
    message = edited()
    message.denormalizer_spec.precompiled_charsmap = edited().normalizer_spec.precompiled_charsmap
    return message.SerializeToString()


REFUSED = {
    "half of it": (lambda: train()[:2000], "no whole file of SentencePiece"),
    "without its last byte": (lambda: train()[:-1], "no whole file of SentencePiece"),
    "empty": (lambda: b"", "no whole file of SentencePiece"),
    "text": (lambda: b'{"model": 1}', "no whole file of SentencePiece"),
    "without pieces": (lambda: without("pieces"), "no whole file of SentencePiece"),
    "pieces alone": (lambda: ModelProto(pieces=edited().pieces).SerializeToString(), "cut, it has no trainer_spec"),
    "without a normalizer": (lambda: without("normalizer_spec"), "cut, it has no normalizer_spec"),
    "suffixes": (lambda: train(treat_whitespace_as_suffix=True), "treat_whitespace_as_suffix is true, wanted false"),
    "denormalizer": (denormalized, "has denormalization rules, wanted none"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_is_cut_or_cannot_be_served_is_refused_in_one_line(tmp_path, make, message):
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.model: .*{message}") as caught:
        load(tmp_path, make())
    assert "\n" not in str(caught.value)
    assert "--tokenizer DIR" in str(caught.value) or "fetch its files again" in str(caught.value)


UNREAD = {
    "XLM-R": (
        {"tokenizer_class": "XLMRobertaTokenizer"},
        "sentencepiece.bpe.model",
        "for the class XLMRobertaTokenizer",
    ),
    "XLNet": ({"tokenizer_class": "XLNetTokenizerFast"}, "spiece.model", "for the class XLNetTokenizer"),
    "Llama": ({}, "spiece.model", "for the class LlamaTokenizer"),
}


@pytest.mark.parametrize(("options", "name", "message"), UNREAD.values(), ids=UNREAD.keys())
def test_files_whose_class_moves_the_ids_are_refused_by_name(tmp_path, options, name, message):
    with pytest.raises(ModelLoadError, match=rf"{name}: is not read {message}, .*add the model's tokenizer\.json"):
        load(tmp_path, train(), name=name, **options)


def test_a_class_whose_code_comes_with_the_model_is_not_read_as_a_plain_one(tmp_path):
    code = {"auto_map": {"AutoTokenizer": ["code.Own", None]}}
    with pytest.raises(ModelLoadError, match="needs code of the model"):
        load(tmp_path, train(), tokenizer_class="Own", **code)
    model = train()
    tokenizer = load(tmp_path, model, tokenizer_class="LlamaTokenizer", **code)
    assert tokenizer.encode("to be") == [1, *SentencePieceProcessor(model_proto=model).encode("to be")]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.model: needs the package sentencepiece.*pip install sentencepiece"
    ):
        load(tmp_path, b"")
