"""The tokenizer of a checkpoint folder, and the compressed token ids that Engram hashes.

Engram looks up n-grams of *normalised* tokens: " The", "the" and "THE" share one compressed id, so an n-gram is found
however it is written. The table is built from the tokenizer once, in the order of the ids; its length fixes the hash
multipliers, so a table of another length than the config's is another model. Source: V4.1 architecture, 8.1.

    raw id --decode--> text --normalise--> key --first seen, first numbered--> compressed id
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashsim.reading import read_json_object, shorten

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKEN_MAP_FILE = "token_map.json"

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
_LONE_SPACE = "\ue000"  # stands for a single space while the ends are stripped


class TokenizerError(ValueError):
    """A tokenizer file that cannot be read, or that does not belong to the config."""


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer:
    """The `tokenizer.json` of a checkpoint folder (or that file itself), as a `tokenizers.Tokenizer`.

    Raises:
        TokenizerError: the file is missing or is not a tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(folder)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if not path.is_file():
        raise TokenizerError(f"{path} is missing; Engram and text prompts need the checkpoint's {TOKENIZER_FILE}")
    try:
        with path.open(encoding="utf-8") as file:
            json.load(file)
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is not a tokenizer file: {error}") from None


def compressed_ids(tokenizer: Tokenizer, vocab_size: int | None = None) -> list[int]:
    """The compressed id of every raw id, 0 to `vocab_size` - 1 (by default every id that the tokenizer has).

    Two ids share a compressed id when their texts are equal after NFKC, NFD, removal of accents, lower case and folding
    of white space. A token that is part of a character (its text has U+FFFD) is known by its own vocabulary string.

    Raises:
        TokenizerError: the tokenizer lacks one of the ids.

    Source: V4.1 architecture, 8.1.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True) if vocab_size is None else vocab_size
    normalise = _normaliser()
    numbers: dict[str, int] = {}
    table = []
    for token_id in range(size):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise TokenizerError(f"the tokenizer has no token {token_id}; the config's vocabulary has {size:,} ids")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = token if _REPLACEMENT in text else normalise(text) or text
        table.append(numbers.setdefault(key, len(numbers)))
    return table


def engram_table(tokenizer: Tokenizer, vocab_size: int, compressed_vocab_size: int) -> list[int]:
    """`compressed_ids`, checked against the config's `engram_compressed_vocab_size`.

    Raises:
        TokenizerError: the numbers of compressed ids differ, so tokenizer and weights are of different models.
    """
    table = compressed_ids(tokenizer, vocab_size)
    found = max(table, default=-1) + 1
    if found != compressed_vocab_size:
        raise TokenizerError(
            f"the tokenizer gives {found:,} compressed ids, the config's engram_compressed_vocab_size is "
            f"{compressed_vocab_size:,}: they belong to different models"
        )
    return table


def token_map_json(token_map: Sequence[int]) -> bytes:
    """The file of compressed ids that no tokenizer gives: of a model with random weights, or without a tokenizer."""
    return json.dumps({"token_map": [int(i) for i in token_map]}).encode()


def read_token_map(path: str | os.PathLike, vocab_size: int, compressed_vocab_size: int) -> list[int]:
    """The compressed ids in such a file, one for each token.

    Raises:
        ConfigError, TokenizerError: the file is not one, or belongs to another config.
    """
    ids = read_json_object(path).get("token_map")
    good = isinstance(ids, list) and len(ids) == vocab_size
    if not good or not all(type(i) is int and 0 <= i < compressed_vocab_size for i in ids):
        raise TokenizerError(
            f"token_map of {Path(path).name} is {shorten(ids)}; accepted: {vocab_size:,} numbers, each 0 to "
            f"{compressed_vocab_size - 1:,}"
        )
    return ids


SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
CHAT_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜deepseek_image｜>",
)
"""Special tokens of the release: ids 0 to 2, and those that the chat format writes (V4.1 architecture, 12)."""


def byte_tokenizer(vocab_size: int) -> Tokenizer | None:
    """A tokenizer for random weights: begin, end, pad, the 256 bytes, the chat format's tokens, then fillers.

    None where the vocabulary is too small for them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *letters, *CHAT_TOKENS]
    if vocab_size < len(names):
        return None
    names += [f"<filler {i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, normalized=False) for n in names if n not in set(letters)])
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text. Nothing is added in front or behind; special tokens written in the text are recognised.

    Raises:
        TokenizerError: the text has a lone surrogate, as bytes of a shell become that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TokenizerError(f"text is {shorten(text)}; accepted: Unicode, without lone surrogates") from None
    return tokenizer.encode(text, add_special_tokens=False).ids


class TextStream:
    """Turns ids into text as they come: `push` returns what is new and certain, `close` the rest.

    A character may take several tokens; its bytes are held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.ids: list[int] = []  # since the last cut, one token before it included
        self.shown = 0

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        self.ids.append(token_id)
        text = self._text()
        if text.endswith(_REPLACEMENT):
            return ""
        new, self.shown = text[self.shown :], len(text)
        if len(self.ids) > 16:  # long texts are not decoded again and again; one token stays as context
            self.ids = self.ids[-1:]
            self.shown = len(self._text())
        return new

    def close(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        text = self._text()
        new, self.shown = text[self.shown :], len(text)
        return new


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list, when there is at least one and all are in the vocabulary.

    Raises:
        TokenizerError: naming the first id that is not.
    """
    ids = list(ids)
    if not ids:
        raise TokenizerError("the prompt is empty; at least one token is needed")
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise TokenizerError(f"token {place} of the prompt is {token_id}; accepted: 0 to {vocab_size - 1}")
    return ids


def _normaliser():
    from tokenizers import Regex, normalizers

    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    strip = normalizers.Strip()

    def normalise(text: str) -> str:
        folded = fold.normalize_str(text)
        if folded == " ":
            return " "
        return strip.normalize_str(folded).replace(_LONE_SPACE, " ")

    return normalise
