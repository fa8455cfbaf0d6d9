"""Reports: sums, JSON that round-trips, and a derivation that a student can follow with a pencil."""

import importlib.util
import json
import re
from fractions import Fraction
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import (
    Report,
    decode_flops,
    decode_read,
    decode_write,
    kv_cache,
    kv_reserved,
    load_config,
    parameters,
    persistent_cache,
    prefill_flops,
)
from flashsim.config import PRESETS

CONTEXTS = [1, 129, 4096]


def reports_of(config, contexts=CONTEXTS):
    """One report of every kind."""
    result = [f(config, contexts) for f in (kv_cache, kv_reserved, decode_read, decode_flops, prefill_flops)]
    return [*result, persistent_cache(config, contexts), decode_write(config), parameters(config)]


def test_json_round_trip(case):
    for report in reports_of(case.config):
        document = report.to_dict()
        text = json.dumps(document, allow_nan=False)
        again = Report.from_dict(json.loads(text))
        assert again.to_dict() == document == json.loads(text)
        assert type(report).from_dict(document).to_dict() == document
        assert str(Report.from_dict(document)).splitlines()[0] == report.title


def test_thirds_survive_as_text(derive):
    """A cache entry for 3 tokens: no double holds its average bytes."""
    config = load_config(derive("v4-flash", num_hidden_layers=1, num_hash_layers=0, compress_ratios=[3]))
    report = persistent_cache(config, 1, snapshots=0)
    assert report.to_dict()["total"] == ["584/3"]
    assert Report.from_dict(report.to_dict()).total() == Fraction(584, 3)
    assert persistent_cache(config, 3, snapshots=0).to_dict()["total"] == [584]


@settings(max_examples=30)
@given(name=st.sampled_from(PRESETS), contexts=st.lists(st.integers(1, 10**9), min_size=1, max_size=4))
def test_round_trip_keeps_every_number(name, contexts):
    report = kv_cache(load_config(name), contexts)
    again = type(report).from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.total() == report.total()
    assert again.rows == report.rows
    for key in ("layer", "component", "tier", "precision"):
        assert again.by(key) == report.by(key)
    assert again.per_token_bytes() == report.per_token_bytes()
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


@settings(max_examples=20)
@given(name=st.sampled_from(PRESETS), contexts=st.lists(st.integers(1, 2**20), min_size=1, max_size=5))
def test_several_contexts_are_what_each_gives_alone(name, contexts):
    config = load_config(name)
    for function in (kv_cache, decode_read, decode_flops, prefill_flops, persistent_cache):
        together = function(config, contexts)
        assert together.total() == [function(config, n).total() for n in contexts]
        assert together.contexts == tuple(contexts)
        alone = function(config, contexts[0]).by("component")
        assert {key: values[0] for key, values in together.by("component").items()} == alone


def test_every_row_has_a_layer_a_formula_and_a_unit(case):
    for report in reports_of(case.config):
        for row in report.rows:
            assert row.unit == report.unit
            assert row.formula and row.numbers and row.component
            assert row.layer is None or 0 <= row.layer < case.d.num_hidden_layers
            assert len(row.values) == len(report.contexts)
            assert all(isinstance(value, int | Fraction) and not isinstance(value, bool) for value in row.values)


def test_every_row_names_a_source(preset):
    for report in reports_of(preset.config):
        assert all(row.source for row in report.rows)


def test_sums_by_several_keys(models):
    report = kv_cache(models["v4.1-flash"], 1000)
    by = report.by("tier", "component")
    assert by["global", "main_kv"] == 3 * 288 * 500 + 288 * 1000
    assert sum(by.values()) == report.total()
    assert report.where(tier="global", component="index_key").total() == 3 * 68 * 500 + 68 * 1000
    assert report.where(layer=20).by("component") == {"main_kv": 288_000, "index_key": 68_000, "window_kv": 67_584}
    assert kv_cache(models["deepseek-llm-67b"], 1000).where(tier="window").total() == 0
    with pytest.raises(ValueError, match="tier is 'nothing'; accepted: window, global, state"):
        report.where(tier="nothing")
    assert report.total() == kv_cache(models["v4.1-flash"], 1000).total()


@pytest.mark.parametrize("key", ["color", "", None, "values", 3])
def test_sums_by_what_is_not_there(models, key):
    with pytest.raises(ValueError, match=r"by is .*; accepted: component, layer, tier, precision"):
        kv_cache(models["v3"], 10).by(key)


# --- for people -------------------------------------------------------------------------------------------------------


def test_the_derivation_of_v32_can_be_followed(models):
    text = str(kv_cache(models["v3.2"], 1000))
    for line in (
        ": 512 FP8 (512) + 4 FP32 scales (16) + 64 BF16 (128) = 656 bytes",
        ": 128 FP8 (128) + 1 FP32 scale (4) = 132 bytes",
        "bytes_per_record x N",
        "656 x 1,000 = 656,000 a layer, x 61 = 40,016,000 bytes",
        "132 x 1,000 = 132,000 a layer, x 61 = 8,052,000 bytes",
        "total: 48,068,000 bytes",
        "global, per token: 61 x 656 + 61 x 132 = 48,068 bytes",
    ):
        assert line in text
    assert "layers 0-60 (61)" in text


def test_the_derivation_of_890_can_be_followed(models):
    text = str(kv_cache(models["v4.1-flash"], "1M"))
    assert "global, per token: 3 x 144 + 3 x 34 + 1 x 288 + 1 x 68 = 890 bytes" in text
    assert "512 FP4 (256) + 32 E4M3 scales (32) = 288 bytes" in text
    assert "layers 2, 8, 14 (3)" in text
    assert "288 x floor(1,000,000 / 2) = 144,000,000 a layer, x 3 = 432,000,000 bytes" in text


def test_printed_lines_add_up(case):
    """The last number of each line is that group's share; together they are the printed total."""
    for report in (kv_cache(case.config, 4097), decode_flops(case.config, 4097)):
        shares = re.findall(r"^    .* = ([\d,.]+) (?:bytes|FLOPs)$", str(report), re.MULTILINE)
        shares = [
            share for line, share in zip(re.findall(r"^    .*$", str(report), re.MULTILINE), shares, strict=False)
        ]
        lines = [line for line in str(report).splitlines() if line.startswith("    ") and "record:" not in line]
        values = [line.rsplit(" = ", 1)[1].split()[0] for line in lines if " = " in line.split(": ", 1)[-1]]
        total = sum(Fraction(value.replace(",", "")) for value in values)
        assert abs(total - report.total()) <= Fraction(len(values), 1000)


def test_numbers_are_exact_in_the_text(models):
    text = str(kv_cache(models["v4-flash"], 4))
    assert "3,514.25 bytes" in text
    assert "nan" not in text.lower().replace("finan", "")


class Table(HTMLParser):
    """Checks that tags close in order, and gathers the text."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.rows = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_html_is_a_well_formed_table(case):
    for report in reports_of(case.config):
        table = Table()
        table.feed(report._repr_html_())
        assert table.open == []
        assert table.rows == len(report.groups()) + 2
        assert report.title in table.words


def test_html_escapes_names_from_a_file(derive):
    config = load_config(derive("v3") | {"_name_or_path": "<script>alert(1)</script>"})
    assert "<script>" not in kv_cache(config, 10)._repr_html_()
    assert "&lt;script&gt;" in kv_cache(config, 10)._repr_html_()


def test_repr_is_short(models):
    assert len(repr(kv_cache(models["v4-pro"], 1000))) < 200


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_flat_table_adds_up(case):
    for report in reports_of(case.config):
        table = report.table()
        assert len(table) == len(report.rows) * len(report.contexts)
        for i, context in enumerate(report.contexts):
            values = [Fraction(entry["value"]) for entry in table if entry["context"] == context]
            total = report.total() if report.single else report.total()[i]
            assert abs(sum(values) - total) <= abs(total) / 10**12


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_pandas(models):
    frame = kv_cache(models["v4.1-flash"], [1000, 2000]).to_pandas()
    assert frame[frame.context == 1000].value.sum() == kv_cache(models["v4.1-flash"], 1000).total()
    assert {"layer", "component", "tier", "precision", "value", "unit", "formula", "source"} <= set(frame.columns)


def test_notes_travel(models):
    report = kv_cache(models["v3"], "1M")
    assert report.notes and Report.from_dict(report.to_dict()).notes == report.notes
    assert f"note: {report.notes[0]}" in str(report)
    assert parameters(models["deepseek-llm-67b"]).notes == ()
