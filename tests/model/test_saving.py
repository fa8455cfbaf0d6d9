"""Written checkpoints: what goes in comes out, in three layouts, whole or not at all; the two commands."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model
from flashsim.config import load_config
from flashsim.reading import ConfigError
from model import convert as convert_module
from model import inspect as inspect_module
from model.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Checkpoint
from model.convert import convert
from model.inspect import expected, inspect
from model.safetensors_file import CheckpointError, encode_header
from model.tensor_table import stored, tensors
from model.tokenizer import TokenizerError
from model.weight_formats import pack, unpack

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"


def values(folder):
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.weight(name) for name in checkpoint.table if name in checkpoint.headers}


def test_saving_float32_keeps_every_bit(tmp_path):
    lm = model.load("tiny", seed=3)
    model.save(lm, tmp_path / "out")
    names = [CONFIG_FILE, SINGLE_FILE, "token_map.json", "tokenizer.json"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    state = lm.state_dict()
    saved = load_file(tmp_path / "out" / SINGLE_FILE)
    assert set(saved) == set(state) and all(torch.equal(saved[name], state[name]) for name in state)
    assert Checkpoint(tmp_path / "out").config == lm.config


@pytest.mark.parametrize("layout", ["float32", "bfloat16", "quantised"])
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 37, "tie_word_embeddings": False, "n_shared_experts": 0}])
def test_random_weights_come_back(tmp_path, layout, changes):
    """Their compressed ids are given by no tokenizer, and a small vocabulary has none at all: without a file of them
    the folder could be written and not be read.
    """
    lm = model.load(load_config("tiny").to_dict() | changes, seed=3)
    model.save(lm, tmp_path / "out", layout)
    inspect(tmp_path / "out")
    again, ids = model.load(tmp_path / "out"), torch.arange(30).view(1, 30)
    assert torch.equal(again.token_map, lm.token_map)
    assert (again.tokenizer is None) == (lm.tokenizer is None) == bool(changes)
    if layout == "float32":
        assert torch.equal(again(ids), lm(ids))


@pytest.mark.parametrize("ids", [None, [0] * 319, [0] * 319 + [160], [0] * 319 + ["1"], {"0": 0}])
def test_compressed_ids_of_another_config(tmp_path, ids):
    model.save(model.load("tiny"), tmp_path / "out")
    (tmp_path / "out" / "token_map.json").write_text(json.dumps({"token_map": ids}))
    with pytest.raises(TokenizerError, match=r"token_map of token_map.json is .*; accepted: 320 numbers, each"):
        model.load(tmp_path / "out")


def test_a_saved_model_loads_and_computes_the_same(tmp_path):
    lm = model.load(GOLDEN / "a32")
    model.save(lm, tmp_path / "out", shard_bytes=10**6)
    assert not (tmp_path / "out" / "token_map.json").exists()  # its tokenizer gives them
    again = model.load(tmp_path / "out")
    golden = load_file(GOLDEN / "a32" / "golden.safetensors")
    assert (again(golden["input_ids"]) - golden["logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["quantised", "bfloat16", "float32"])
def test_layouts_by_value(tmp_path, layout):
    lm = model.load("tiny", seed=4)
    model.save(lm, tmp_path / "out", layout)
    saved = values(tmp_path / "out")
    for name, spec in tensors(lm.config).items():
        if spec.part != "text":
            continue
        value = lm.state_dict()[name]
        if layout == "quantised" and spec.quantised:
            value = unpack(*pack(value, spec.kind), spec.kind)
        elif layout != "float32" and spec.kind != "f32":
            value = value.bfloat16().float()
        assert torch.equal(saved[name], value), name
    assert ("quantization_config" in Checkpoint(tmp_path / "out").root) == (layout == "quantised")


def test_the_quantised_layout_has_the_headers_of_the_release(tmp_path):
    lm = model.load("tiny")
    model.save(lm, tmp_path / "out", "quantised")
    text = {name: spec for name, spec in tensors(lm.config).items() if spec.part == "text"}
    assert Checkpoint(tmp_path / "out").headers == stored(text)


def test_converting_the_float_checkpoint_gives_the_packed_one(tmp_path):
    folder = convert(GOLDEN / "a32", tmp_path / "out", "quantised", floats="float32", shard_bytes=300_000)
    ours, golden = Checkpoint(folder), Checkpoint(GOLDEN / "aq")
    assert ours.headers == golden.headers and len(ours.files) > 2
    for name in golden.headers:
        assert torch.equal(ours.owner[name].raw(name), golden.owner[name].raw(name)), name
    assert (folder / "tokenizer.json").read_bytes() == (GOLDEN / "a32" / "tokenizer.json").read_bytes()
    logits = load_file(GOLDEN / "aq" / "golden.safetensors")
    assert (model.load(folder)(logits["input_ids"]) - logits["logits"]).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["aq", "draft", "vision"])
def test_there_and_back_keeps_every_value(tmp_path, name):
    convert(GOLDEN / name, tmp_path / "q", "quantised", floats="float32")
    convert(tmp_path / "q", tmp_path / "f", "float32")
    convert(tmp_path / "f", tmp_path / "q2", "quantised", floats="float32")
    packed, floats, again = (values(tmp_path / folder) for folder in ("q", "f", "q2"))
    assert packed.keys() == floats.keys() == again.keys() == values(GOLDEN / name).keys()
    for key in packed:
        assert torch.equal(packed[key], floats[key]) and torch.equal(packed[key], again[key]), key


def test_pieces_of_big_tensors(tmp_path, monkeypatch):
    """Packing piece by piece gives what packing at once gives."""
    convert(GOLDEN / "a32", tmp_path / "one", "quantised")
    monkeypatch.setattr("model.saving.PIECE_ELEMENTS", 64 * 33)
    convert(GOLDEN / "a32", tmp_path / "many", "quantised")
    assert (tmp_path / "one" / SINGLE_FILE).read_bytes() == (tmp_path / "many" / SINGLE_FILE).read_bytes()


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 10**9])
def test_shards(tmp_path, shard_bytes):
    folder = convert(GOLDEN / "aq", tmp_path / "out", "quantised", shard_bytes=shard_bytes)
    checkpoint = Checkpoint(folder)
    assert (checkpoint.index is None) == (shard_bytes == 10**9)
    for file in checkpoint.files.values():
        size = sum(header.nbytes for header in file.headers.values())
        assert size <= shard_bytes or len({name.rpartition(".")[0] for name in file.headers}) == 1
        for place in file.places.values():  # readers that map a file can view every tensor in place
            itemsize = place.header.nbytes // max(1, torch.Size(place.header.shape).numel())
            assert (file.data_begin + place.begin) % itemsize == 0
        load_file(file.path)  # the usual reader takes it
    if checkpoint.index:
        index = json.loads((folder / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == checkpoint.nbytes()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    convert(GOLDEN / "c32", tmp_path / "empty", "float32")
    before = (tmp_path / "empty" / SINGLE_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="is there already; accepted: a new folder, or an empty one"):
        convert(GOLDEN / "a32", tmp_path / "empty", "float32")
    assert (tmp_path / "empty" / SINGLE_FILE).read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is there already"):
        convert(GOLDEN / "a32", tmp_path / "file", "float32")


def test_all_or_nothing(tmp_path):
    """A value that cannot be stored, late in the model: no folder, and nothing left beside it."""
    lm = model.load("tiny")
    for value, layout, pattern in (
        (float("nan"), "float32", "head.weight has a value that is not finite"),
        (3.4e38, "bfloat16", "head.weight has a value that is not finite in torch.bfloat16"),
    ):
        lm.head.weight.data[7, 7] = value
        with pytest.raises(CheckpointError, match=pattern):
            model.save(lm, tmp_path / "out", layout, shard_bytes=10**5)
        assert list(tmp_path.iterdir()) == []
    lm.head.weight.data[7, 7] = 0
    lm.layers[7].ffn.experts[5].w3.weight.data[40, 3] = float("inf")
    with pytest.raises(CheckpointError, match=r"layers\.7\.ffn\.experts\.5\.w3\.weight cannot be packed"):
        model.save(lm, tmp_path / "out", "quantised")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path):
    def stop(name, nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(GOLDEN / "c32", tmp_path / "out", "float32", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path):
    lm = model.load("tiny")
    with pytest.raises(CheckpointError, match="layout is 'int4'; accepted: quantised, bfloat16, float32"):
        model.save(lm, tmp_path / "out", "int4")
    with pytest.raises(CheckpointError, match="shard_bytes is 0"):
        model.save(lm, tmp_path / "out", shard_bytes=0)
    with pytest.raises(CheckpointError, match="floats is 'float16'"):
        convert(GOLDEN / "c32", tmp_path / "out", "quantised", floats="float16")
    with pytest.raises(CheckpointError, match="accepted with quantised alone"):
        convert(GOLDEN / "c32", tmp_path / "out", "float32", floats="float32")
    lm.layers[0].attn.wkv.weight = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match=r"parameters are not those of its config: layers\.0\.attn\.wkv\.weight"):
        model.save(lm, tmp_path / "out")


@pytest.mark.parametrize("place", ["file/below", "a" * 300])
def test_a_place_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*\); accepted: a new folder in a place that can"):
        model.save(model.load("tiny"), tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_expected_totals_of_the_release():
    report = expected("v4.1-flash")
    assert (report.tensors, report.nbytes, report.parameters) == (96_085, 510_286_023_000, 763_205_315_794)
    assert report.by_type["I8"] == (47_232, 278_585_671_680, 278_585_671_680)
    assert set(report.by_part) == {"text", "drafter", "vision"}
    assert "510,286,023,000 bytes" in str(report)


def test_inspecting_reads_no_weights(tmp_path):
    """The whole release, 510 GB in 48 shards, as sparse files that hold headers alone."""
    folder = tmp_path / "release"
    folder.mkdir()
    shutil.copy(ROOT / "data" / "configs" / "v4.1-flash.json", folder / CONFIG_FILE)
    root = json.loads((folder / CONFIG_FILE).read_text())
    headers = stored(tensors(load_config("v4.1-flash"), root["vision_config"]))
    shards = [{} for _ in range(48)]
    for i, name in enumerate(headers):
        shards[46 + ("layers.14." in name) if ".engram." in name else i * 46 // len(headers)][name] = headers[name]
    places = {}
    for i, shard in enumerate(shards):
        path = folder / f"model-{i + 1:05d}-of-00048.safetensors"
        head = encode_header(shard)
        with path.open("wb") as file:
            file.write(head)
            try:
                file.truncate(len(head) + sum(header.nbytes for header in shard.values()))
            except OSError as error:
                pytest.skip(f"this file system has no sparse files of that size: {error}")
        places |= dict.fromkeys(shard, path.name)
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    report = inspect(folder)
    assert (report.tensors, report.nbytes, report.files, report.notes) == (96_085, 510_286_023_000, 48, [])


@pytest.mark.parametrize(("name", "count"), [("a32", 486), ("aq", 813), ("c32", None), ("draft", 379), ("vision", 252)])
def test_inspecting_golden_folders(name, count):
    report = inspect(GOLDEN / name)
    assert count is None or report.tensors == count
    assert report.layout == ("quantised" if name == "aq" else "unquantised")
    assert sum(sums[0] for sums in report.by_part.values()) == report.tensors
    assert sum(sums[2] for sums in report.by_part.values()) == report.nbytes
    assert sum(sums[2] for sums in report.by_type.values()) == report.nbytes


def test_notes(tmp_path):
    model.save(
        model.load("tiny"), tmp_path / "tiny", config_json=json.loads((ROOT / "data/configs/tiny.json").read_text())
    )
    assert inspect(tmp_path / "tiny").notes == [
        "The config implies a drafter part; the files have none.",
        "The config implies a vision part; the files have none.",
    ]
    folder = shutil.copytree(GOLDEN / "aq", tmp_path / "aq")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert inspect(folder).notes == ["The index states total_size 1333933; the tensors have 1,333,932 bytes."]


# --- commands ---------------------------------------------------------------------------------------------------------


def test_inspect_command(capsys, tmp_path):
    assert inspect_module.main(["v4.1-flash", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["tensors"], printed["bytes"]) == (96_085, 510_286_023_000)
    assert inspect_module.main([str(GOLDEN / "aq")]) == 0
    assert "1,333,932" in capsys.readouterr().out
    assert inspect_module.main([str(GOLDEN / "aq" / CONFIG_FILE)]) == 0
    assert "aq: quantised, expected" in capsys.readouterr().out
    assert inspect_module.main([str(GOLDEN / "v4")]) == 0
    assert "229             345,201           1,383,364" in capsys.readouterr().out
    for wrong in (str(tmp_path), "v4-flash", "no-such-model"):
        assert inspect_module.main([wrong]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_convert_command(capsys, tmp_path):
    arguments = [str(GOLDEN / "c32"), str(tmp_path / "out"), "--to", "bfloat16", "--quiet"]
    assert convert_module.main(arguments) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert convert_module.main(arguments) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["inspect", "convert"])
def test_commands_run_as_modules(module):
    run = subprocess.run(
        [sys.executable, "-m", f"model.{module}", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and f"python -m model.{module}" in run.stdout


def test_expected_of_other_generations():
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v4'"):
        expected("v4-flash")


@pytest.mark.parametrize("options", [{"packed": True}, {"offload": True}], ids=["packed", "offload"])
def test_a_model_that_stays_packed_saves_the_same_values(tmp_path, options, monkeypatch):
    """Seen red with the rows of a piece taken from the start of the weight. Scales may be smaller than in the file."""
    monkeypatch.setattr("model.saving.PIECE_ELEMENTS", 2048)
    lm = model.load(GOLDEN / "aq", **options)
    for layout in ("quantised", "float32"):
        model.save(lm, tmp_path / layout, layout, config_json=lm.config_json, tokenizer=lm.tokenizer)
        before, after = values(GOLDEN / "aq"), values(tmp_path / layout)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in Checkpoint(GOLDEN / "aq").packed)
