"""Bytes that a decode step unpacks are the bytes that it is predicted to read."""

import pytest
import torch

import model
from flashsim.config import LADDER_PRESETS, load_config
from flashsim.traffic import decode_read
from model.read_counter import REASONS, ReadCounter


def step(lm, tokens):
    """The counter of a decode step with so many tokens visible."""
    ids = torch.randint(0, lm.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache = lm.new_cache()
    if tokens > 1:
        lm(ids[:, :-1], cache=cache)
    with ReadCounter(cache) as counter:
        lm(ids[:, -1:], cache=cache)
    assert all("unpack" not in vars(codec) for codec in counter.codecs.values())  # gone again
    return counter


@pytest.mark.parametrize("name", LADDER_PRESETS)
@pytest.mark.parametrize("tokens", [1, 5, 70, 130])
def test_read_is_predicted(name, tokens):
    """Seen red with all places of a store unpacked for scoring, and with a window of one token more."""
    lm = model.load(name)
    rows = step(lm, tokens).compare(decode_read(lm.config, tokens))
    assert all(row.reason is None and row.counted == row.predicted for row in rows)


def test_the_difference_that_is_named():
    lm = model.load("tiny")  # a pool of 16 entries
    rows = {row.component: row for row in step(lm, 60).compare(decode_read(lm.config, 60))}
    assert rows["index_key"].counted > rows["index_key"].predicted and rows["index_key"].reason == REASONS["index_key"]
    assert rows["main_kv"].reason is None


def test_a_pool_smaller_than_a_selection():
    config = load_config(load_config("tiny").to_dict() | {"candidate_topk_blocks": 1})  # 4 entries; index_topk is 6
    rows = {row.component: row for row in step(model.load(config), 36).compare(decode_read(config, 36))}
    assert rows["main_kv"].counted == rows["main_kv"].predicted == 36 * (4 * 6 + 2 * 4)  # 36 bytes an entry


def test_a_difference_without_a_name():
    lm = model.load("ladder-v3")
    with pytest.raises(ValueError, match="main_kv: 35,840 bytes read, 40,960 predicted"):
        step(lm, 7).compare(decode_read(lm.config, 8))
