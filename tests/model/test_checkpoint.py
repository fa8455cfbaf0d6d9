"""Bad checkpoints: each is refused with one sentence that names what is wrong, and nothing is half loaded."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import model
from flashsim.reading import ConfigError
from model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from model.convert import convert
from model.safetensors_file import CheckpointError, SafetensorsFile
from model.tokenizer import TokenizerError

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


@pytest.fixture
def single(tmp_path):
    """A copy of `c32`: one file, float32."""
    return Path(shutil.copytree(GOLDEN / "c32", tmp_path / "c32", ignore=shutil.ignore_patterns("golden*")))


@pytest.fixture
def sharded(tmp_path):
    """A copy of `aq`: two shards, packed."""
    return Path(shutil.copytree(GOLDEN / "aq", tmp_path / "aq", ignore=shutil.ignore_patterns("golden*")))


def refuse(folder, pattern, error=CheckpointError, **options):
    """The message of the error that loading gives: one line that matches the pattern."""
    with pytest.raises(error, match=pattern) as caught:
        model.load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def change(path, **changes):
    """Rewrites a safetensors file with tensors replaced, added, or (None) taken away."""
    tensors = load_file(path)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def read_header(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit_json(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_a_missing_tensor(single):
    change(single / SINGLE_FILE, **{"layers.1.attn.wkv.weight": None, "norm.weight": None})
    message = refuse(single, "c32: lacks ")
    assert "layers.1.attn.wkv.weight" in message and "norm.weight" in message


def test_an_extra_tensor(single):
    change(single / SINGLE_FILE, **{"layers.9.attn.wkv.weight": torch.zeros(2), "surprise": torch.zeros(1)})
    message = refuse(single, "has tensors that the config does not imply")
    assert "layers.9.attn.wkv.weight" in message and "surprise" in message


def test_a_wrong_shape(single):
    change(single / SINGLE_FILE, **{"layers.0.attn.wkv.weight": torch.zeros(32, 31)})
    refuse(single, r"layers\.0\.attn\.wkv\.weight has shape \[32, 31\], the config gives \[32, 32\]")


def test_a_transposed_tensor(single):
    weight = load_file(single / SINGLE_FILE)["layers.0.ffn.gate.weight"]
    change(single / SINGLE_FILE, **{"layers.0.ffn.gate.weight": weight.T.contiguous()})
    refuse(single, r"layers\.0\.ffn\.gate\.weight has shape \[32, 4\], the config gives \[4, 32\]")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_a_wrong_type(single, dtype):
    change(single / SINGLE_FILE, **{"norm.weight": torch.zeros(32).to(dtype)})
    refuse(single, r"norm\.weight is .*, accepted: F32, BF16, F16, F64$")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_load(single, dtype):
    weight = load_file(single / SINGLE_FILE)["norm.weight"].to(dtype)
    change(single / SINGLE_FILE, **{"norm.weight": weight})
    assert torch.equal(model.load(single).norm.weight, weight.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number(single, value):
    weight = load_file(single / SINGLE_FILE)["norm.weight"]
    weight[3] = value
    change(single / SINGLE_FILE, **{"norm.weight": weight})
    refuse(single, r"norm\.weight has a value that is not finite")


def test_a_value_too_large_for_the_wanted_type(single):
    change(single / SINGLE_FILE, **{"embed.weight": torch.full((160, 32), 1e300, dtype=torch.float64)})
    refuse(single, r"embed\.weight has a value that is not finite in torch.float32")
    assert model.load(single, dtype=torch.float64).embed.weight[0, 0] == 1e300


def test_config_and_weights_disagree(single):
    edit_json(single / "config.json", lambda c: c["text_config"].update(hidden_size=64))
    refuse(single, r"has shape .*, the config gives")
    edit_json(single / "config.json", lambda c: c["text_config"].update(hidden_size=32, kv_source_layer_ids=[1]))
    refuse(single, "compress_ratios is .*", ConfigError)
    edit_json(single / "config.json", lambda c: c.update(model_type="deepseek_v5"))
    refuse(single, "text_config.model_type is|model_type is", ConfigError)


def test_no_config(single):
    (single / "config.json").unlink()
    refuse(single, "config file is", ConfigError)


def test_the_engram_tokenizer(tmp_path):
    folder = shutil.copytree(GOLDEN / "a32", tmp_path / "a32")
    edit_json(folder / "tokenizer.json", lambda t: t["model"]["vocab"].pop("tok0"))
    refuse(folder, "the tokenizer has no token", TokenizerError)
    (folder / "tokenizer.json").unlink()
    refuse(folder, "lacks tokenizer.json")


# --- packed weights ---------------------------------------------------------------------------------------------------


def set_byte(folder, name, byte):
    for shard in SHARDS:
        header, _ = read_header(folder / shard)
        if name in header:
            raw = bytearray((folder / shard).read_bytes())
            (length,) = struct.unpack("<Q", raw[:8])
            raw[8 + length + header[name]["data_offsets"][0]] = byte
            (folder / shard).write_bytes(raw)
            return
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a", "layers.4.ffn.experts.7.w2", "layers.3.engram.embed"])
def test_a_scale_that_is_nan(sharded, name):
    set_byte(sharded, f"{name}.scale", 255)
    refuse(sharded, rf"{name}\.weight cannot be used: its scale at \[0, 0\] is NaN \(byte 255\)")


def test_a_packed_scale_that_is_nan(sharded):
    """Packed weights in memory are looked through when loaded, mapped ones when they are expanded."""
    for expert in range(8):
        set_byte(sharded, f"layers.4.ffn.experts.{expert}.w2.scale", 255)
    message = r"layers\.4\.ffn\.experts\.\d\.w2\.weight cannot be used: its scale"
    with pytest.raises(CheckpointError, match=message):
        model.load(sharded, packed=True)
    lm = model.load(sharded, offload=True)
    with pytest.raises(CheckpointError, match=message):
        lm(torch.tensor([[1, 2, 3]]))


def test_a_weight_that_is_nan(sharded):
    set_byte(sharded, "layers.0.attn.wq_a.weight", 0x7F)
    refuse(sharded, r"layers\.0\.attn\.wq_a\.weight cannot be used: its value at \[0, 0\] is not finite")


def test_scales_that_are_missing_misshaped_or_mistyped(sharded):
    shard = next(s for s in SHARDS if "layers.0.attn.wq_a.scale" in read_header(sharded / s)[0])
    scale = load_file(sharded / shard)["layers.0.attn.wq_a.scale"]
    change(sharded / shard, **{"layers.0.attn.wq_a.scale": scale[:, :1].contiguous()})
    refuse(sharded, r"layers\.0\.attn\.wq_a\.scale has shape \[1, 1\], the config gives \[1, 2\]")
    change(sharded / shard, **{"layers.0.attn.wq_a.scale": scale.view(torch.uint8)})
    refuse(sharded, r"layers\.0\.attn\.wq_a\.scale is U8, accepted: F8_E8M0")
    change(sharded / shard, **{"layers.0.attn.wq_a.scale": None})
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].pop("layers.0.attn.wq_a.scale"))
    refuse(sharded, r"lacks layers\.0\.attn\.wq_a\.scale")


def test_a_float_weight_with_scales(sharded):
    shard = next(s for s in SHARDS if "layers.0.attn.wq_a.weight" in read_header(sharded / s)[0])
    change(sharded / shard, **{"layers.0.attn.wq_a.weight": torch.zeros(32, 64)})
    refuse(sharded, r"has scales of weights that are not packed: layers\.0\.attn\.wq_a\.scale")


def test_a_mixture_loads(sharded):
    """A converter may expand some weights and leave their scales out; the file says which."""
    expected = Checkpoint(GOLDEN / "aq").weight("layers.0.attn.wo_a.weight")
    for shard in SHARDS:
        header, _ = read_header(sharded / shard)
        gone = {name: None for name in ("layers.0.attn.wo_a.scale",) if name in header}
        new = {name: expected for name in ("layers.0.attn.wo_a.weight",) if name in header}
        change(sharded / shard, **gone, **new)
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].pop("layers.0.attn.wo_a.scale"))
    golden = load_file(GOLDEN / "aq" / "golden.safetensors")
    assert (model.load(sharded)(golden["input_ids"]) - golden["logits"]).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", [128, 128]),
        ("scale_fmt", "float"),
        ("expert_dtype", "fp8"),
        ("quant_method", "awq"),
        ("activation_scheme", "static"),
    ],
)
def test_another_quantisation(sharded, field, value):
    edit_json(sharded / "config.json", lambda c: c["quantization_config"].update({field: value}))
    refuse(sharded, f"quantization_config.{field} is ")


def test_quantisation_said_in_one_place_alone(sharded, single):
    edit_json(sharded / "config.json", lambda c: c.pop("quantization_config"))
    refuse(sharded, "has packed weights, but its config.json has no quantization_config")
    edit_json(single / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    refuse(single, "has a quantization_config, but none of its weights is packed")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 3, 8, 100, -4, -1])
def test_a_truncated_file(single, keep):
    path = single / SINGLE_FILE
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    refuse(single, "truncated|has 0 bytes|has 3 bytes|claims a header")


def test_bytes_after_the_end(single):
    with (single / SINGLE_FILE).open("ab") as file:
        file.write(b"x")
    refuse(single, "has 1 bytes after its last tensor")


def test_a_header_that_claims_too_much(single):
    header, data = read_header(single / SINGLE_FILE)
    for length in (2**63, 2**40, 100_000_001):
        write_raw(single / SINGLE_FILE, header, data, length)
        refuse(single, "claims a header of")


HEADERS = {
    "not JSON": (b"{nope", "header that is not JSON"),
    "not an object": ([], "not a JSON object"),
    "deep": (b"[" * 100_000, "header that is not JSON"),
    "twice": (b'{"a":{},"a":{}}', "names a twice"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "needs exactly dtype"),
    "unknown type": ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "has type 'F3'"),
    "type is a list": ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "has type"),
    "negative": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"has shape \[-1\]"),
    "fraction": ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, r"has shape \[1.5\]"),
    "boolean": ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "has shape"),
    "offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, "4 bytes, but its data_offsets"),
    "reversed": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "but its data_offsets"),
    "gap": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "leaves a gap"),
    "overlap": (
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        "overlaps another tensor",
    ),
    "beyond": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "truncated: its tensors take 16 bytes"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_contradict(tmp_path, case):
    header, pattern = HEADERS[case]
    write_raw(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=pattern):
        SafetensorsFile(tmp_path / "x.safetensors")


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_pickles_are_refused_unopened(single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = single / SINGLE_FILE
    path.write_bytes(pickle.dumps(Bomb(), protocol=2))
    refuse(single, "is a pickle, not safetensors")
    torch.save({"norm.weight": torch.zeros(3)}, path)
    assert zipfile.is_zipfile(path)
    refuse(single, "is a zip archive .*, not safetensors")
    torch.save({"norm.weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    refuse(single, "is a pickle, not safetensors")
    path.rename(single / "pytorch_model.bin")
    refuse(single, "has pytorch_model.bin, which may be a pickle and is never opened")
    assert not (tmp_path / "unpickled").exists()


def test_other_formats_are_named(single):
    path = single / SINGLE_FILE
    path.write_bytes(b"GGUF" + b"\0" * 100)
    refuse(single, "is a GGUF file")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(single, "Git LFS pointer")


def test_a_folder_without_weights(single):
    (single / SINGLE_FILE).unlink()
    refuse(single, "has no model.safetensors and no model.safetensors.index.json")
    refuse(single / "nowhere", "is not a folder")
    (single / SINGLE_FILE).mkdir()
    refuse(single, "is not a regular file")


# --- index ------------------------------------------------------------------------------------------------------------


def test_a_missing_shard(sharded):
    (sharded / SHARDS[1]).unlink()
    refuse(sharded, f"aq lacks {SHARDS[1]}")


def test_a_truncated_shard(sharded):
    with (sharded / SHARDS[1]).open("r+b") as file:
        file.truncate(400_000)
    refuse(sharded, f"{SHARDS[1]} is truncated")


def test_shards_without_an_index(sharded):
    (sharded / INDEX_FILE).unlink()
    refuse(sharded, "has 2 shards but no model.safetensors.index.json")


@pytest.mark.parametrize(
    "shard",
    ["../c.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".", "a\\b.safetensors", "C:x.safetensors", 3],
)
def test_an_index_that_points_outside(sharded, shard):
    shutil.copy(sharded / SHARDS[0], sharded.parent / "c.safetensors")
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].update({"norm.weight": shard}))
    refuse(sharded, "places norm.weight in .*accepted: the name of a file in the folder itself")


def test_an_index_that_points_to_another_kind_of_file(sharded):
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].update({"norm.weight": "config.json"}))
    refuse(sharded, "accepted: a .safetensors file")


@pytest.mark.parametrize("name", [SHARDS[0], INDEX_FILE, "config.json", "tokenizer.json"])
def test_links_that_lead_outside_are_not_followed(sharded, name):
    outside = sharded.parent / "outside"
    outside.mkdir()
    (sharded / name).rename(outside / name)
    (sharded / name).symlink_to(outside / name)
    refuse(sharded, "is a link to a place outside the folder")
    (outside / name).unlink()
    refuse(sharded, "lacks .*broken link|shards but no|config file is", ValueError)


def test_links_into_a_hub_cache_are_followed(sharded, tmp_path):
    """A hub cache keeps `snapshots/<revision>/<name>` as links into its `blobs`."""
    snapshot = tmp_path / "cache" / "snapshots" / "abc"
    blobs = tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for i, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert len(Checkpoint(snapshot).headers) == 813
    assert (convert(snapshot, tmp_path / "out", "float32") / "tokenizer.json").is_file()


def test_an_index_and_shards_that_disagree(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    other = SHARDS[1] if index["weight_map"]["embed.weight"] == SHARDS[0] else SHARDS[0]
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].update({"embed.weight": other}))
    refuse(sharded, "names tensors that their shard does not have: embed.weight")
    edit_json(sharded / INDEX_FILE, lambda i: i["weight_map"].pop("embed.weight"))
    refuse(sharded, "has embed.weight, which .* does not name")


def test_a_tensor_in_two_shards(sharded):
    here = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]["norm.weight"]
    other = next(s for s in SHARDS if s != here)
    change(sharded / other, **{"norm.weight": torch.ones(64)})
    refuse(sharded, f"{other} has norm.weight, which .* places in {here}")


def test_an_index_that_names_a_tensor_twice(sharded):
    text = (sharded / INDEX_FILE).read_text()
    (sharded / INDEX_FILE).write_text(text.replace('"weight_map": {', f'"weight_map": {{"norm.weight": "{SHARDS[0]}",'))
    refuse(sharded, "names norm.weight twice")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX_FILE).write_text(text, encoding="latin-1")
    refuse(sharded, "is not JSON|has no weight_map")


def test_one_file_and_an_index(sharded):
    shutil.copy(sharded / SHARDS[0], sharded / SINGLE_FILE)
    refuse(sharded, "has both")


def test_parts_are_whole_or_absent():
    checkpoint = Checkpoint(GOLDEN / "draft")
    assert checkpoint.parts == ("text", "drafter") and Checkpoint(GOLDEN / "vision").parts == ("text", "vision")
    lm = model.load(GOLDEN / "draft")
    assert len(lm.other_tensors) == sum(name.startswith("mtp.") for name in checkpoint.headers) > 0


@pytest.mark.parametrize(("folder", "gone"), [("draft", "mtp.1.attn.wkv.weight"), ("vision", "aligner.w2.bias")])
def test_a_part_that_is_not_whole(tmp_path, folder, gone):
    copy = shutil.copytree(GOLDEN / folder, tmp_path / folder)
    change(copy / SINGLE_FILE, **{gone: None})
    refuse(copy, f"lacks {gone}")


def test_a_file_that_changes_after_it_was_opened(single):
    file = SafetensorsFile(single / SINGLE_FILE)
    with (single / SINGLE_FILE).open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(CheckpointError, match="changed"):
        file.tensor("norm.weight")
