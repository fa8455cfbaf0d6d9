"""The explorer's numbers are those of the library; what cannot be is a sentence; every change is fast."""

import itertools
import json
import re
import time
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import pytest

from flashsim.budget import Fleet, capacity, variant
from flashsim.config import PRESETS, load_config
from flashsim.explorer import (
    INDEX_BITS,
    MAIN_BITS,
    Settings,
    explore,
    headline,
    mechanisms,
    memory_svg,
    page,
    table_text,
    waterfall_svg,
)
from flashsim.flops import decode_flops
from flashsim.kv_cache import kv_bytes_per_token, kv_cache


@pytest.mark.parametrize("name", PRESETS)
def test_a_release_as_it_is(name):
    view, config = explore(Settings(model=name, context="128Ki", sequences=3)), load_config(name)
    assert not view.error
    assert view.per_token_bytes == kv_bytes_per_token(config) == view.waterfall[-1].after
    assert view.tier_bytes == kv_cache(config, 131072).by("tier")
    assert view.decode_flops == decode_flops(config, 131072).weighted_total()
    assert view.capacity.sequences == capacity(config, Fleet("h200-sxm", 8, 8), 131072).sequences
    assert view.fits == (view.capacity.sequences >= 3)


@pytest.mark.parametrize(("main", "index"), list(itertools.product(MAIN_BITS, INDEX_BITS)))
@pytest.mark.parametrize("turned", [{}, {"encoder_owners": 6, "encoder_ratio": 4}, {"encoder_decoder": False}])
def test_the_waterfall_ends_where_the_formula_does(main, index, turned):
    view = explore(Settings(main=main, index=index, **turned))
    bars = view.waterfall
    assert all(a.after == b.before for a, b in itertools.pairwise(bars)) and bars[0].before == 0
    assert bars[-1].after == view.per_token_bytes
    assert bars[0].after == 38 * 2 * (512 + 128)
    records = (
        {"released": 288, "FP4": 288, "FP8": 528, "BF16": 1024},
        {"released": 68, "FP4": 68, "FP8": 132, "BF16": 256},
    )
    record = records[0][main] + records[1][index]
    owners = Fraction(turned.get("encoder_owners", 3), turned.get("encoder_ratio", 2)) + (
        20 if "encoder_decoder" in turned else 1
    )
    assert view.per_token_bytes == record * owners


def test_labels_say_how_many_caches_each_half_has():
    labels = [bar.label for bar in explore(Settings(encoder_decoder=False, encoder_owners=2)).waterfall]
    assert "encoder shares 2" in labels and "decoder shares 20" in labels


def test_the_window_is_constant_and_counted_apart():
    views = [explore(Settings(window=w)) for w in (64, 128)]
    assert views[0].per_token_bytes == views[1].per_token_bytes
    assert 2 * views[0].tier_bytes["window"] == views[1].tier_bytes["window"]


def test_what_a_generation_does_not_have_is_said():
    view = explore(Settings(model="v3", decoder_owners=2, window=64))
    assert view.per_token_bytes == 70272
    assert "v3 has no decoder_owners: not applied" in view.notes and any("sliding_window" in n for n in view.notes)


def test_a_foreign_config_as_text_fields_or_path(tmp_path):
    fields = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 1024, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    for source in (fields, json.dumps(fields), str(path)):
        view = explore(Settings(model=source, context=4096))
        assert not view.error and view.per_token_bytes == 4 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("turned", "text"),
    [
        ({"model": "gpt-9"}, "model is 'gpt-9'"),
        ({"model": "{not json"}, "accepted: the text of a config.json"),
        ({"model": '{"model_type": "t5"}'}, "t5"),
        ({"context": 0}, "context is"),
        ({"context": "a lot"}, "context is 'a lot'"),
        ({"sequences": 0}, "sequences is 0"),
        ({"gpus": 6, "tensor_parallel": 4}, "gpus is 6; accepted: a multiple of tensor_parallel, 4"),
        ({"memory_gb": float("nan")}, "memory_gb is nan"),
        ({"weights_gb": -1}, "weights_gb is -1"),
        ({"encoder_owners": 40}, "encoder_owners is 40; accepted: at most its 18 layers"),
        ({"decoder_ratio": 0}, "decoder_ratio is 0"),
        ({"window": 0}, "window is 0"),
        ({"main": "INT3"}, "main is 'INT3'; accepted: released, BF16, FP8, FP4"),
        ({"model": "v1", "tensor_parallel": 3, "gpus": 3}, "tensor_parallel"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_no_number(turned, text):
    view = explore(Settings(**turned))
    assert text in view.error and "\n" not in view.error
    assert view.config is None and view.rows() == [("error", view.error, "")] and headline(view) == ""
    assert "role='alert'" in waterfall_svg(view) and not re.search(r"bytes a token", page(view))


@pytest.mark.parametrize(
    "turned",
    [
        {"context": 10**9, "sequences": 10**9}, {"context": 1}, {"memory_gb": 1e-6}, {"weights_gb": 10**8},
        {"gpus": 10**9, "tensor_parallel": 1}, {"encoder_ratio": 10**6, "decoder_ratio": 10**6},
        {"encoder_owners": 18, "decoder_owners": 20, "main": "BF16", "index": "BF16"},
    ],
)  # fmt: skip
def test_extremes_are_numbers_or_a_plain_no(turned):
    view = explore(Settings(**turned))
    assert not view.error and view.per_token_bytes > 0 and view.capacity.sequences >= 0
    assert view.fits == (view.settings.sequences <= view.capacity.sequences)
    assert len(table_text(view).splitlines()) == len(view.rows())


@pytest.mark.parametrize("name", ["v1", "v4-flash", "v4.1-flash"])
def test_the_picture_is_whole_and_says_its_numbers(name):
    view = explore(Settings(model=name))
    root = ElementTree.fromstring(waterfall_svg(view))
    space = "{http://www.w3.org/2000/svg}"
    width = float(root.get("width"))
    for bar in root.iter(f"{space}rect"):
        assert float(bar.get("x")) >= 0 and float(bar.get("x")) + float(bar.get("width")) <= width - 100
    assert str(root.find(f"{space}desc").text).count(":") == len(view.waterfall) + 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_change_takes_less_than_a_tenth_of_a_second(name):
    page(explore(Settings(model=name)))
    times = []
    for context in (2**12, 2**17 + 1, 2**20, 999_999):
        start = time.perf_counter()
        page(explore(Settings(model=name, context=context, window=None, encoder_owners=None)))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


def test_a_variant_is_the_library_s():
    view = explore(Settings(encoder_owners=2, encoder_ratio=4, decoder_ratio=2))
    assert view.config == variant(encoder_owners=2, encoder_ratio=4, decoder_ratio=2)


@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
@pytest.mark.parametrize("turned", [{}, {"sequences": 10**9, "context": 10**9}, {"memory_gb": 1e-3}, {"context": 1}])
def test_the_memory_bars_are_whole(name, turned):
    view = explore(Settings(model=name, **turned))
    for width in (540, 660):
        root = ElementTree.fromstring(memory_svg(view, width))
        space = "{http://www.w3.org/2000/svg}"
        for bar in root.iter(f"{space}rect"):
            assert float(bar.get("x")) >= 0 and float(bar.get("x")) + float(bar.get("width")) <= width + 0.1
        for label in root.iter(f"{space}text"):
            if label.get("text-anchor") == "start":
                assert float(label.get("x")) + 6 * len(label.text) <= width + 1, label.text


def test_a_gpu_that_is_too_full_says_so():
    assert "more than its 141 GB, the orange line" in memory_svg(explore(Settings(sequences=10**6)))
    assert "more than" not in memory_svg(explore(Settings(sequences=750)))


def test_configs_without_a_source_and_mechanisms_of_each_family():
    alone = replace(
        load_config("v4.1-flash"), compress_ratios=(0,) * 40, kv_source_layer_ids=(), index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )  # fmt: skip
    view = explore(Settings(model=alone, window=64))
    assert not view.error and view.per_token_bytes == 0 and view.tier_bytes["window"] == 40 * 64 * 528
    assert "encoder_owners" in explore(Settings(model=alone, encoder_owners=2)).notes[0]
    assert "<svg" in page(view)
    assert mechanisms(alone) == {"window": (1, 1024, 128)} and mechanisms(load_config("v3")) == {}
    found = mechanisms(load_config("v4.1-flash"))
    assert {name: value for name, (_, _, value) in found.items()} == {
        "window": 128, "encoder_owners": 3, "encoder_ratio": 2, "decoder_owners": 1, "decoder_ratio": 1,
    }  # fmt: skip
