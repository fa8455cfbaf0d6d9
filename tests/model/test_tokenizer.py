"""Compressed ids: normalisation rule by rule, and the golden tokenizer whose number of ids the config states."""

import json
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

from model.tokenizer import (  # noqa: E402
    TextStream,
    TokenizerError,
    byte_tokenizer,
    check_ids,
    compressed_ids,
    encode,
    engram_table,
    load_tokenizer,
)

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


def word_level(words):
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


def byte_level():
    """A byte-level tokenizer of the 256 bytes, as the released one is at its base."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def test_golden_number_of_compressed_ids():
    config = json.loads((GOLDEN / "a32" / "config.json").read_text())["text_config"]
    tokenizer = load_tokenizer(GOLDEN / "a32")
    table = compressed_ids(tokenizer)
    assert len(table) == config["vocab_size"]
    assert max(table) + 1 == config["engram_compressed_vocab_size"] == 130
    assert table == engram_table(tokenizer, config["vocab_size"], config["engram_compressed_vocab_size"])
    ids = {tokenizer.id_to_token(i): table[i] for i in range(len(table))}
    assert ids["a"] == ids["A"] and ids["e"] == ids["é"] == ids["É"] and ids[" "] == ids["\n"] == ids["\t"]
    assert ids["a"] != ids["b"] and ids["1"] != ids["2"]


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("a", "A", True),
        ("é", "e", True),
        ("\uff21", "a", True),  # full width
        ("\ufb01", "fi", True),  # ligature
        (" a", "a", True),
        ("a \t b", "a b", True),
        ("\n\n", " ", True),
        ("\u00a0", " ", True),  # NFKC turns it into a space
        ("\v", "x", False),
        ("ß", "ss", False),  # lower case, not case folding
        ("ı", "i", False),
        ("a b", "ab", False),
        ("\ue000", " ", True),  # the stand-in for a lone space
        ("²", "2", True),
        ("İ", "i", True),  # NFD parts the dot from the letter
        ("Σ", "σ", True),
        ("\u0301", "\u0302", False),  # both normalise to nothing, so their texts count
        ("\u0301 ", " ", True),
        ("。", ".", False),
    ],
)
def test_which_texts_share_an_id(left, right, equal):
    first, second = compressed_ids(word_level(["<unk>", left, right]))[1:]
    assert (first == second) is equal


def test_numbers_are_given_in_the_order_of_first_sight():
    assert compressed_ids(word_level(["z", "b", "B", "a", "Z", "A", "c"])) == [0, 1, 1, 2, 0, 2, 3]


def test_partial_characters_are_known_by_their_vocabulary_string():
    """Of the 256 bytes 128 are no character alone: each keeps an id of its own although all decode to U+FFFD."""
    tokenizer = byte_level()
    table = compressed_ids(tokenizer)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(256)]
    partial = [table[i] for i, text in enumerate(texts) if "\ufffd" in text]
    assert len(partial) == 128 and len(set(partial)) == 128
    upper, lower = tokenizer.token_to_id("A"), tokenizer.token_to_id("a")
    assert table[upper] == table[lower]


def test_special_tokens_are_kept():
    tokenizer = word_level(["<unk>", "a"])
    tokenizer.add_special_tokens(["<S>", "<T>"])
    table = compressed_ids(tokenizer)
    assert len(set(table)) == 4


def test_a_tokenizer_of_another_model():
    tokenizer = load_tokenizer(GOLDEN / "a32")
    with pytest.raises(TokenizerError, match=r"gives 130 compressed ids, the config's .* is 131"):
        engram_table(tokenizer, 160, 131)
    with pytest.raises(TokenizerError, match="no token 160"):
        engram_table(tokenizer, 161, 130)


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match="is missing"):
        load_tokenizer(tmp_path)
    for content in ("", "{", "{}", "[1]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match="not a tokenizer file"):
            load_tokenizer(tmp_path)


def test_a_text_that_is_no_unicode():
    """Bytes of a shell that are no UTF-8 come as lone surrogates."""
    with pytest.raises(TokenizerError, match=r"text is 'a.udcff'; accepted: Unicode"):
        encode(byte_tokenizer(512), "a\udcff")


def test_check_ids():
    assert check_ids((0, 159), 160) == [0, 159]
    for ids, message in (
        ([], "empty"),
        ([1, 160], "token 1 of the prompt is 160"),
        ([-1], "is -1; accepted: 0 to 159"),
    ):
        with pytest.raises(TokenizerError, match=message):
            check_ids(ids, 160)


@pytest.mark.parametrize("text", ["naïve café 你好 🙂 end", "x" * 50, "🙂🙂🙂" * 10, ""])
def test_streaming_writes_the_whole_text_and_no_half_characters(text):
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in encode(tokenizer, text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.close() == text


def test_streaming_shows_an_unfinished_character_at_the_end():
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in encode(tokenizer, "ok 🙂")[:-1]]
    assert "".join(pieces) == "ok " and "\ufffd" in stream.close()
