"""The expected headers: the released sums to the last tensor and byte, and the golden files name by name."""

import json
import math
import struct
from collections import Counter
from pathlib import Path

import pytest

from flashsim import load_config
from flashsim.params import parameters
from flashsim.reading import ConfigError
from model.tensor_table import Header, packed, scale_name, stored, tensors

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
RELEASED = json.loads((ROOT / "data" / "configs" / "v4.1-flash.json").read_text())


def released_table():
    return tensors(load_config("v4.1-flash"), RELEASED["vision_config"])


def headers_of(path):
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: (h["dtype"], tuple(h["shape"])) for name, h in header.items() if name != "__metadata__"}


def test_the_release_has_96085_tensors_and_510286023000_bytes():
    headers = stored(released_table())
    assert len(headers) == 96_085
    assert sum(header.nbytes for header in headers.values()) == 510_286_023_000


def test_the_release_by_type():
    """V4.1 architecture, 11.4."""
    headers = stored(released_table()).values()
    count = Counter(header.dtype for header in headers)
    elements = Counter()
    for header in headers:
        elements[header.dtype] += math.prod(header.shape)
    assert count == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}
    assert elements == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }


def test_the_release_by_part():
    """V4.1 architecture, 14.2: parameters, without scales."""
    sums = Counter()
    for spec in released_table().values():
        sums[spec.part] += math.prod(spec.shape)
    assert sums == {
        "text": 551_566_180_464 + 196_928_504_320,
        "drafter": 14_225_362_530,
        "vision": 485_253_120 + 15_360,
    }
    assert sum(sums.values()) == 763_205_315_794


@pytest.mark.parametrize("name", ["v4.1-flash", "a32", "c32"])
def test_text_parameters_are_those_the_library_counts(name):
    config = load_config(name if name in ("v4.1-flash",) else GOLDEN / name)
    table = tensors(config)
    assert sum(math.prod(s.shape) for s in table.values() if s.part == "text") == parameters(config).total()


@pytest.mark.parametrize(
    ("folder", "quantised"), [("a32", False), ("aq", True), ("c32", False), ("draft", False), ("vision", False)]
)
def test_golden_headers_are_the_expected_ones(folder, quantised):
    if not (GOLDEN / folder / "model.safetensors").exists() and folder != "aq":
        pytest.skip(f"the {folder} checkpoint is not in this checkout")
    root = json.loads((GOLDEN / folder / "config.json").read_text())
    found = {}
    for path in sorted((GOLDEN / folder).glob("model*.safetensors")):
        found |= headers_of(path)
    expected = stored(tensors(load_config(GOLDEN / folder), root["vision_config"]), quantised=quantised, floats="F32")
    assert found == {name: tuple(header) for name, header in expected.items()}


def test_released_rows_of_the_table_of_names():
    """Shapes as section 11.2 prints them."""
    headers = stored(released_table())
    for name, dtype, shape in [
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.3.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.3.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("layers.5.hc_ffn_fn", "F32", (24, 20480)),
    ]:
        assert headers[name] == (dtype, shape)
    for absent in ("layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "hc_head_fn"):
        assert absent not in headers


def test_groups_that_do_not_fill_a_block_have_a_scale_of_their_own():
    config = load_config(GOLDEN / "a32")
    spec = tensors(config)["layers.0.ffn.experts.0.w1.weight"]._replace(shape=(33, 48))
    assert packed(spec) == (Header("I8", (33, 24)), Header("F8_E8M0", (33, 2)))
    assert packed(spec._replace(kind="fp8"))[1] == Header("F8_E8M0", (2, 2))
    assert scale_name("a.weight") == "a.scale"


def test_vision_fields_are_checked():
    config = load_config("v4.1-flash")
    for change in ({"patch_size": None}, {"hidden_size": 0}, {"num_hidden_layers": True}, {"intermediate_size": "1"}):
        with pytest.raises(ConfigError, match=rf"vision_config\.{next(iter(change))} is"):
            tensors(config, RELEASED["vision_config"] | change)
    assert not any(s.part == "vision" for s in tensors(config, {"num_hidden_layers": 0}).values())
