"""`model.load` of every generation: the right class, the goldens in both ways, and checkpoints that do not fit."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import model
from flashsim.config import LADDER_PRESETS, PRESETS, load_config
from flashsim.params import parameters
from flashsim.reading import ConfigError
from model.backend import BackendError
from model.generations import MODELS, tensors
from model.safetensors_file import CheckpointError

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
EARLIER = ("v1", "v3", "v32", "v4")


@pytest.mark.parametrize("name", EARLIER)
@pytest.mark.parametrize("cache_rounding", [True, False])
def test_goldens(name, cache_rounding):
    """With the rounding of the cache that is trained (V3.2, V4), and without; V1 and V3 round nothing."""
    lm = model.load(GOLDEN / name, cache_rounding=cache_rounding)
    golden = load_file(GOLDEN / name / "golden.safetensors")
    rounded = GOLDEN / name / "golden_q.safetensors"
    logits = load_file(rounded)["logits"] if cache_rounding and rounded.exists() else golden["logits"]
    assert (lm(golden["input_ids"]) - logits).abs().max() < 1e-4  # measured 1.1e-6 to 1.4e-5
    assert lm.tokenizer is None and lm.config_json["model_type"] == lm.config.model_type and lm.other_tensors == ()


@pytest.mark.parametrize("name", LADDER_PRESETS)
def test_every_generation_is_called_in_the_same_way(name):
    lm = model.load(name, "reference", torch.float32, "cpu", True, seed=3)
    assert type(lm) is MODELS[type(lm.config)] and f"{name}, backend='reference'" in repr(lm)
    ids = torch.arange(20).view(2, 10)
    cache = lm.new_cache(2, capacity=12)
    logits = lm(ids, cache=cache, lengths=[10, 4])
    assert logits.shape == (2, 10, 320) and logits.dtype == torch.float32
    assert lm(ids[:, :1], cache=cache, last=True).shape == (2, 320)
    assert cache.lengths == [11, 5] and cache.fork([1]).lengths == [5]
    assert set(cache.nbytes(by="component")) >= {"main_kv"} and cache.nbytes(sequence=1) < cache.nbytes(sequence=0)


@pytest.mark.parametrize("name", [*PRESETS, *LADDER_PRESETS])
def test_parameters(name):
    """The tensors of a checkpoint are the parameters that are counted; but the table of experts by token id."""
    config = load_config(name)
    if hasattr(config, "n_routed_experts"):
        config = replace(config, n_routed_experts=16)  # 256 take seconds to make
    table = tensors(config)
    counted = sum(math.prod(s.shape) for s in table.values() if s.kind != "ids" and s.part == "text")
    assert counted == parameters(config).total()
    assert all(s.shape == (config.vocab_size, config.num_experts_per_tok) for s in table.values() if s.kind == "ids")


def changed(tmp_path, name, tensors=None, config=None):
    """A copy of a golden checkpoint with changes."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("golden*"))
    weights = load_file(folder / "model.safetensors")
    (tensors or (lambda weights: None))(weights)
    save_file(weights, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def rename(old, new):
    return lambda weights: weights.update({new: weights.pop(old)})


@pytest.mark.parametrize(
    "name, change, text",
    [
        ("v1", lambda w: w.pop("model.norm.weight"), "lacks model.norm.weight"),
        ("v3", lambda w: w.pop("model.layers.2.mlp.gate.e_score_correction_bias"), "lacks .*e_score_correction_bias"),
        ("v4", rename("norm.weight", "model.norm.weight"), "lacks norm.weight"),
        ("v4", lambda w: w.update(extra=torch.ones(1)), "does not imply: extra"),
        ("v4", lambda w: w.update({"layers.0.ffn.gate.bias": torch.ones(6)}), "does not imply: layers.0.ffn.gate.bias"),
        ("v4", lambda w: w["layers.0.ffn.gate.tid2eid"].fill_(6), "tid2eid names experts outside 0 to 5"),
        ("v4", lambda w: w["layers.1.ffn.gate.tid2eid"].fill_(-1), "tid2eid names experts outside 0 to 5"),
        (
            "v4",
            lambda w: w.update({"layers.0.ffn.gate.tid2eid": torch.zeros(160, 2)}),
            "tid2eid is F32, accepted: I64, I32",
        ),
        ("v32", lambda w: w["lm_head.weight"].fill_(torch.nan), "lm_head.weight has a value that is not finite"),
        (
            "v3",
            lambda w: w.update({"lm_head.weight": torch.zeros(160, 47)}),
            r"lm_head.weight has shape \[160, 47\], the config gives \[160, 48\]",
        ),
        (
            "v3",
            lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "has packed weights, which are read for V4.1 alone; accepted: F32, BF16, F16, F64",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(tmp_path, name, change, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        model.load(changed(tmp_path, name, change))
    assert "\n" not in str(caught.value)


def test_draft_layers_are_left_aside(tmp_path):
    for name, draft in (("v3", "model.layers.4.eh_proj.weight"), ("v4", "mtp.0.norm.weight")):
        with pytest.raises(CheckpointError, match=f"does not imply: {draft}"):
            model.load(changed(tmp_path / "none", name, lambda w, d=draft: w.update({d: torch.ones(3)})))
        more = {"num_nextn_predict_layers": 1}
        lm = model.load(changed(tmp_path / "one", name, lambda w, d=draft: w.update({d: torch.ones(3)}), more))
        assert lm.other_tensors == (draft,)


def test_whole_numbers_of_32_bits_and_half_floats(tmp_path):
    def narrow(weights):
        for name, value in weights.items():
            weights[name] = value.to(torch.int32 if "tid2eid" in name else torch.bfloat16)

    lm = model.load(changed(tmp_path, "v4", narrow))
    assert lm.layers[0].ffn.gate.tid2eid.dtype == torch.int64 and lm.embed.weight.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in LADDER_PRESETS if "v4.1" not in name])
def test_save_and_load(tmp_path, name):
    lm, ids = model.load(name, seed=1), torch.arange(12).view(1, 12)
    again = model.load(model.save(lm, tmp_path / "float32"))
    assert again.config == lm.config and torch.equal(again(ids), lm(ids))
    model.load(model.save(lm, tmp_path / "bfloat16", "bfloat16"))
    with pytest.raises(CheckpointError, match=r"layout is 'quantised' with .*; accepted: bfloat16, float32"):
        model.save(lm, tmp_path / "quantised", "quantised")


def test_what_the_earlier_models_do_not_have():
    for options in ({"packed": True}, {"offload": True}):
        with pytest.raises(CheckpointError, match=r"packed|offload"):
            model.load("ladder-v4-flash", **options)
        with pytest.raises(CheckpointError, match="v4 is of deepseek_v4; packed and offload are for deepseek_v41"):
            model.load(GOLDEN / "v4", **options)
    for name in ("v1", "v3", "v32", "v4"):
        with pytest.raises(BackendError, match="backend is 'triton'; accepted: reference"):
            model.load(GOLDEN / name, backend="triton")
    with pytest.raises(ConfigError, match="attention_bias"):
        model.load(json.loads((GOLDEN / "v4" / "config.json").read_text()) | {"attention_bias": True})


def test_a_released_model_does_not_fit(monkeypatch):
    monkeypatch.setattr("model.memory.free_memory", lambda device: 16 * 10**9)
    with pytest.raises(MemoryError, match=r"deepseek-llm-67b with its weights needs 269,700,005,888 bytes"):
        model.load("v1")
