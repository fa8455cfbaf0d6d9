"""Every command of the command line, as a new user would type it, and what bad input gets."""

import csv
import io
import itertools
import json
import os
import subprocess
import sys

import pytest

from flashsim import PRESETS, decode_flops, kv_cache, load_config
from flashsim.__main__ import main
from flashsim.paths import data_dir


@pytest.fixture
def run(capsys):
    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def document(run, *arguments):
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    return json.loads(out)


# --- what each command says -------------------------------------------------------------------------------------------


def test_models(run):
    code, out, err = run("models")
    assert code == 0 and not err
    assert all(preset in out for preset in PRESETS)
    assert [row["model"] for row in document(run, "models")["models"]] == list(PRESETS)


def test_kv_json_has_the_keys_and_numbers_of_the_contract(run):
    kv = document(run, "kv", "v4.1-flash", "--context", 1_000_001)
    assert kv["model"] == "v4.1-flash" and kv["context"] == 1_000_001
    assert kv["per_token_bytes"] == 890
    assert kv["global_bytes"] == 890_000_356
    assert kv["window_bytes"] == 2_703_360
    assert kv["state_bytes"] == 3 * 2 * 512 * 4  # value and gate of one pending token, float32, in three layers
    assert kv["total_bytes"] == kv["global_bytes"] + kv["window_bytes"] + kv["state_bytes"]
    assert kv["reserved_bytes"] >= kv["total_bytes"]
    row = kv["rows"][2]
    assert set(row) == {
        "layer",
        "component",
        "tier",
        "bytes_per_record",
        "tokens_per_record",
        "records",
        "bytes",
        "formula",
        "source",
    }
    assert all(row["records"] * row["bytes_per_record"] == row["bytes"] for row in kv["rows"])
    assert sum(row["bytes"] for row in kv["rows"]) == kv["total_bytes"]


def test_kv_per_token_is_a_number_with_its_fraction(run):
    assert document(run, "kv", "v4-flash")["per_token_bytes"] == 3514.25


@pytest.mark.parametrize(("layout", "expected"), [("bf16", 3200), ("mxfp8", 1490), ("mxfp8,fp8-indexer", 1650)])
def test_kv_layouts(run, layout, expected):
    assert document(run, "kv", "v4.1-flash", "--layout", layout)["per_token_bytes"] == expected


def test_kv_of_several_contexts(run):
    reports = document(run, "kv", "v3", "--context", "4Ki", "1M")["reports"]
    assert [report["context"] for report in reports] == [4096, 1_000_000]
    assert [report["global_bytes"] for report in reports] == [70_272 * 4096, 70_272 * 1_000_000]


@pytest.mark.parametrize("by", ["component", "layer", "tier"])
def test_kv_by(run, by):
    kv = document(run, "kv", "v4.1-flash", "--by", by)
    assert sum(kv["by"].values()) == kv["total_bytes"]
    code, out, _ = run("kv", "v4.1-flash", "--by", by)
    assert code == 0 and f"{kv['total_bytes']:,}" in out


def test_kv_of_one_of_eight_ranks(run):
    assert document(run, "kv", "v1", "--tensor-parallel", 8)["per_token_bytes"] == 389_120 // 8
    assert document(run, "kv", "v3", "--tp", 8)["per_token_bytes"] == 70_272


def test_the_derivation_shows_symbols_numbers_and_product(run):
    _, out, _ = run("kv", "v3.2", "--context", 1000)
    assert "512 FP8 (512) + 4 FP32 scales (16) + 64 BF16 (128) = 656 bytes" in out
    assert "656 x 1,000 = 656,000 a layer, x 61 = 40,016,000 bytes" in out


def test_flops_json(run):
    flops = document(run, "flops", "v4.1-flash", "--context", "4Ki", "1Mi")
    config = load_config("v4.1-flash")
    assert flops["contexts"] == [4096, 2**20]
    assert flops["raw_flops"] == decode_flops(config, [4096, 2**20]).total()
    assert [round(w / 1e9, 1) for w in flops["weighted_flops"]] == [20.2, 25.7]
    for i in range(2):
        assert sum(row["raw_flops"][i] for row in flops["rows"]) == flops["raw_flops"][i]
    assert {"component", "precision", "raw_flops"} == set(flops["rows"][0])


def test_flops_weights_and_precisions_can_be_changed(run):
    plain = document(run, "flops", "v4.1-flash", "--context", "1Mi")
    heavier = document(run, "flops", "v4.1-flash", "--context", "1Mi", "--weight", "fp4=0.5")
    fp4 = sum(row["raw_flops"][0] for row in plain["rows"] if row["precision"] == "fp4")
    assert heavier["weighted_flops"][0] - plain["weighted_flops"][0] == fp4 / 4
    cheaper = document(run, "flops", "v4.1-flash", "--context", "1Mi", "--precision", "routed_experts=fp4")
    assert cheaper["weighted_flops"][0] < plain["weighted_flops"][0]


def test_prefill_is_about_half_with_an_encoder_decoder(run):
    prefill = document(run, "flops", "v4.1-flash", "--prefill", "--context", "128Ki")
    decode = document(run, "flops", "v4.1-flash", "--context", "128Ki")
    assert 0.3 < prefill["raw_flops"][0] / 2**17 / decode["raw_flops"][0] < 0.55
    assert prefill["raw_flops_per_prompt_token"][0] < decode["raw_flops"][0] / 2


def test_params_json(run):
    params = document(run, "params", "v4.1-flash")
    assert params["total"] == 551_880_835_184
    assert params["engram"] == 196_613_849_600
    assert params["active_decode"] == 16_130_595_952
    assert params["active_prefill"] == 7_895_575_352


def test_compare(run):
    rows = document(run, "compare", "v1", "v4.1-flash", "--context", "128Ki")["models"]
    assert [row["per_token_bytes"] for row in rows] == [389_120, 890]
    assert rows[0]["total_bytes"] == 389_120 * 2**17


def test_ladder_starts_and_ends_where_it_should(run):
    ladder = document(run, "ladder")["ladder"]
    assert (ladder[0]["per_token_bytes"], ladder[-1]["per_token_bytes"]) == (389_120, 890)
    for before, after in itertools.pairwise(ladder):
        assert after["per_token_bytes"] - before["per_token_bytes"] == after["change_bytes"]


def test_verify_writes_its_table_and_fails_when_a_claim_does_not_hold(run, tmp_path, monkeypatch):
    code, out, _ = run("verify", "--out", tmp_path / "new" / "folder")
    assert code == 0 and "Every verdict is the expected one." in out
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["claims.csv", "claims.md"]
    from flashsim import claims

    monkeypatch.setitem(claims._COMPUTED, "kv_bytes_per_token.V1", ("query heads for KV heads", lambda: 3_112_960))
    code, out, _ = run("verify")
    assert code == 1 and "EXPECTED exact" in out


def test_figures_names_what_it_wrote(run, tmp_path):
    pytest.importorskip("matplotlib")
    written = document(run, "figures", "--only", "figure-1b", "--out", tmp_path)["written"]
    assert len(written) == 4 and all(os.path.getsize(path) for path in written)


@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("kv", "v4-pro"),
        ("kv", "v4-pro", "--by", "layer"),
        ("flops", "v3", "--context", "4096", "8192"),
        ("params", "v2"),
        ("compare", "v3", "v4"),
        ("ladder",),
        ("verify",),
    ],
)
def test_csv_has_a_header_and_equal_rows(run, arguments):
    code, out, _ = run(*arguments, "--csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert code == 0 and len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("command", ["kv", "flops", "params"])
def test_every_preset_in_every_form(run, command, model):
    for form in ((), ("--json",), ("--csv",)):
        code, out, _ = run(command, model, *form)
        assert code == 0 and out


def test_a_path_and_a_folder_work_like_the_preset(run, tmp_path):
    source = data_dir() / "configs" / "v4-flash.json"
    (tmp_path / "config.json").write_text(source.read_text())
    for model in (source, tmp_path, tmp_path / "config.json"):
        assert document(run, "kv", model)["per_token_bytes"] == 3514.25


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4Ki", 4096), ("128Ki", 131_072), ("1M", 10**6), ("1Mi", 2**20), ("4K", 4000), ("1", 1)],
)
def test_contexts(run, text, tokens):
    assert document(run, "kv", "v4.1-flash", "--context", text)["context"] == tokens
    _, out, _ = run("kv", "v4.1-flash", "--context", text)
    assert f"{tokens:,} tokens" in out  # the number used is always shown


def test_a_context_beyond_the_models_is_a_note_on_stderr(run):
    code, out, err = run("kv", "v1", "--context", "1M", "--json")
    assert code == 0 and json.loads(out)["notes"] and "extrapolates" in err
    assert run("kv", "v4.1-flash", "--context", "1Mi")[2] == ""


# --- bad input: one line, exit code 2, nothing written ----------------------------------------------------------------


@pytest.mark.parametrize(
    "context", ["0", "-1", "many", "", "1.5", "1000000000000", "10^12", "1T", "nan", "1e6", "0x10"]
)
def test_bad_contexts(run, context):
    code, out, err = run("kv", "v3", f"--context={context}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "context" in err and "accepted" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("kv", "v5"),
        ("kv", "nosuch.json"),
        ("kv",),
        ("kv", "v3", "--layout", "fp3"),
        ("kv", "v3", "--layout", "main="),
        ("kv", "v3", "--tp", "3"),
        ("kv", "v3", "--tp", "0"),
        ("kv", "v3", "--tp", "two"),
        ("kv", "v3", "--by", "colour"),
        ("kv", "v3", "--json", "--csv"),
        ("flops", "v3", "--weight", "fp2=1"),
        ("flops", "v3", "--weight", "fp8=heavy"),
        ("flops", "v3", "--weight", "fp8=-1"),
        ("flops", "v3", "--weight", "fp8"),
        ("flops", "v3", "--precision", "engines=fp8"),
        ("flops", "v3", "--precision", "attention=fp6"),
        ("compare",),
        ("figures", "--only", "figure-9"),
        ("tell", "me"),
        (),
    ],
)
def test_bad_arguments(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"model_type": "deepseek_v5"}',
        b'{"model_type": "deepseek_v41", "model_type": "deepseek_v4"}',
        b'{"model_type": "llama", "hidden_size": NaN}',
        b'{"model_type": "llama"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    ],
)
def test_bad_files(run, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    code, out, err = run("kv", tmp_path / "config.json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "accepted" in err


@pytest.mark.parametrize("command", ["figures", "verify"])
def test_an_unwritable_folder_gets_one_line_and_nothing_is_written(run, tmp_path, command):
    if command == "figures":
        pytest.importorskip("matplotlib")
    (tmp_path / "taken").write_text("a file")
    code, out, err = run(command, "--out", tmp_path / "taken" / "out")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["taken"]


# --- as processes -----------------------------------------------------------------------------------------------------


def _process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "flashsim", *arguments], capture_output=True, text=True, **options)


def test_as_a_process():
    done = _process("kv", "v4.1-flash", "--json", "--context", "1000001")
    assert done.returncode == 0 and not done.stderr
    assert json.loads(done.stdout)["global_bytes"] == kv_cache(load_config("v4.1-flash"), 1_000_001).tier_bytes(
        "global"
    )
    wrong = _process("kv", "v9")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and not wrong.stdout


def test_a_reader_who_has_seen_enough_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m flashsim kv v4-pro --by layer --csv | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("model") and not done.stderr


# --- what if ----------------------------------------------------------------------------------------------------------


def test_capacity_is_the_library_s(run):
    from flashsim import Fleet, capacity

    rows = {
        row["quantity"]: row["value"] for row in document(run, "capacity", "v3.2", "--mix", "4Ki=3", "128Ki")["rows"]
    }
    fit = capacity("v3.2", Fleet("h200-sxm", 8, 8), {"4Ki": 3, "128Ki": 1})
    assert rows["sequences in all"] == fit.sequences and rows["free for the cache of a GPU"] == fit.free_bytes
    code, out, _ = run("capacity", "v1", "--device", "h100-sxm", "--weights-gb", "135", "--kept-free", "0.2")
    assert code == 0 and "weights on a GPU" in out and "16,875,000,000 bytes" in out


def test_search_prints_the_front(run):
    found = document(run, "search", "890")
    assert found["tried"] == 432 and [row["stored_bytes"] for row in found["front"]] == [178]
    more = document(run, "search", "400", "--objectives", "stored_bytes", "kept_numbers")
    assert [row["kept_numbers"] for row in more["front"]] == [320, 480, 640]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("capacity", "v3", "--gpus", "6"), "gpus is 6; accepted: a multiple of tensor_parallel, 8"),
        (("capacity", "v3", "--device", "tpu"), "device is 'tpu'; accepted: a100-80gb"),
        (("capacity", "v3", "--mix", "4Ki=0"), "context_mix is 0; accepted: a share above 0"),
        (("capacity", "v3", "--mix", "4Ki=x"), "mix is 'x'; accepted: a number"),
        (("capacity", "v3", "--kept-free", "1"), "kept_free is 1; accepted: a share from 0 to below 1"),
        (("search", "few"), "bytes is 'few'; accepted: a number"),
        (("search", "890", "--objectives", "quality"), "objectives is 'quality'; accepted: stored_bytes"),
    ],
)
def test_what_if_with_bad_input(run, arguments, text):
    code, out, err = run(*arguments)
    assert code == 2 and not out and text in err and err.count("\n") == 1
