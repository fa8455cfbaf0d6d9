"""Configs that every formula is tried on: the seven presets, and derived ones that no table lists.

A test that takes `case` runs once for each. `case.d` holds the plain numbers of the config file and `case.layers` what
each layer is, worked out here from the file alone: neither comes from the library.
"""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from flashsim import load_config

# The same examples on every machine and however busy it is; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

CONFIGS = Path(__file__).resolve().parents[2] / "data" / "configs"
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
PRESET_NAMES = ("deepseek-llm-67b", "v2", "v3", "v3.2", "v4-flash", "v4-pro", "v4.1-flash")

OPTIONAL = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "q_lora_rank": None,
    "moe_layer_freq": 1,
    "topk_method": None,
    "layer_types": None,
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "engram_max_ngram_size": 1,
    "engram_n_heads": 0,
    "engram_head_dim": 0,
}


def read(name):
    """The JSON of a preset's file."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


def flat(data):
    """The text model's fields, with defaults for those that may be absent."""
    fields = data | data.get("text_config", {}) | {"model_type": data["model_type"]}
    fields = OPTIONAL | fields
    if fields["model_type"] in ("llama", "mistral", "qwen2", "qwen3"):
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    return SimpleNamespace(**fields)


def changed(name, **changes):
    """A preset's fields, flattened, with some replaced; a change to `...` removes the field."""
    data = read(name)
    data = data | data.pop("text_config", {}) | {"model_type": data["model_type"]}
    data.pop("vision_config", None)
    data |= changes
    return {key: value for key, value in data.items() if value is not ...}


def layers_of(d):
    """What each layer is, straight from the config file: a list of plain records.

    kind: full, window, mla, dsa, csa, hca, csa2. ratio: tokens an entry stands for. owns: whether it has a main cache.
    selects: whether it runs an indexer query. chosen: whether it attends to selected entries. pool: whether it scores
    the candidate pool alone. decoder: whether it lies in the decoder half.
    """
    layers = []
    for i in range(d.num_hidden_layers):
        layer = SimpleNamespace(
            i=i, kind="", ratio=1, window=0, owns=False, selects=False, chosen=False, pool=False, decoder=False,
            dense=True, hashed=False, engram=None, source=None, selection=None,
        )  # fmt: skip
        if d.model_type in ("llama", "mistral", "qwen2", "qwen3"):
            sliding = d.layer_types[i] == "sliding_attention" if d.layer_types else False
            if d.model_type == "mistral" and not d.layer_types and getattr(d, "sliding_window", None):
                sliding = True
            if d.model_type in ("qwen2", "qwen3") and getattr(d, "use_sliding_window", False):
                sliding = i >= d.max_window_layers
            layer.kind = "window" if sliding else "full"
            layer.window = d.sliding_window if sliding else 0
            layer.owns = not sliding
        elif d.model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
            sparse = d.model_type == "deepseek_v32"
            layer.kind = "dsa" if sparse else "mla"
            layer.owns, layer.selects, layer.chosen = True, sparse, sparse
            layer.dense = i < d.first_k_dense_replace or i % d.moe_layer_freq != 0
        elif d.model_type == "deepseek_v4":
            layer.ratio, layer.window, layer.dense = d.compress_ratios[i], d.sliding_window, False
            layer.kind = {0: "window", 4: "csa"}.get(layer.ratio, "hca")
            layer.owns = layer.ratio > 0
            layer.selects = layer.chosen = layer.kind == "csa"
            layer.hashed = i < d.num_hash_layers
        else:
            layer.ratio, layer.window, layer.dense = d.compress_ratios[i], d.sliding_window, False
            layer.kind = "csa2" if layer.ratio else "window"
            layer.engram = d.engram_layer_ids.index(i) if i in d.engram_layer_ids else None
            layer.decoder = bool(d.kv_source_layer_ids) and i >= d.kv_source_layer_ids[-1]
            if layer.ratio:
                layer.source = [s for s in d.kv_source_layer_ids if s <= i][-1]
                layer.selection = [s for s in d.index_source_layer_ids if s <= i][-1]
                layer.owns, layer.selects, layer.chosen = layer.source == i, layer.selection == i, True
                c = d.candidate_source_layer_id
                candidates = c >= 0
                layer.pool = candidates and layer.selects and not layer.owns and i > c >= layer.source
        if layer.owns and layer.source is None:
            layer.source = i
        layers.append(layer)
    return layers


QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "attention_bias": False,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 5000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 9,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 4,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "sliding_window": 77,
}  # fmt: skip

# name -> the dict that is handed to load_config
DERIVED = {
    "v1 with other heads": changed(
        "deepseek-llm-67b", num_hidden_layers=7, num_attention_heads=6, num_key_value_heads=3, head_dim=80,
        hidden_size=500, intermediate_size=1000, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
    ),
    "v1 multi-head": changed("deepseek-llm-67b", num_key_value_heads=64, num_hidden_layers=3),
    "llama with sliding layers": changed(
        "deepseek-llm-67b", num_hidden_layers=5, sliding_window=33,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    ),
    "qwen3-4b": QWEN3_4B,
    "qwen2 with sliding layers": QWEN2,
    "mistral with a window": MISTRAL,
    "v2 without a query rank": changed(
        "v2", num_hidden_layers=27, hidden_size=2048, num_attention_heads=16, q_lora_rank=None, n_routed_experts=64,
    ),
    "v2 with other ranks": changed(
        "v2", num_hidden_layers=5, kv_lora_rank=96, qk_rope_head_dim=18, qk_nope_head_dim=50, v_head_dim=70,
        first_k_dense_replace=0, tie_word_embeddings=True, n_shared_experts=0,
    ),
    "v3 with a dense layer in two": changed("v3", num_hidden_layers=11, moe_layer_freq=2, first_k_dense_replace=4),
    "v3 all dense": changed("v3", num_hidden_layers=4, first_k_dense_replace=9),
    "v3.2 with another indexer": changed(
        "v3.2", num_hidden_layers=9, kv_lora_rank=384, qk_rope_head_dim=32, index_n_heads=24, index_head_dim=256,
        index_topk=100, q_lora_rank=700,
    ),
    "v4 with other ratios": changed(
        "v4-flash", num_hidden_layers=9, compress_ratios=[4, 0, 16, 4, 100, 0, 3, 4, 16], sliding_window=50,
        head_dim=320, index_head_dim=64, index_topk=7, index_n_heads=24, num_hash_layers=0, hc_mult=2,
        o_groups=16, o_lora_rank=96, tie_word_embeddings=True,
    ),
    "v4 windows alone": changed("v4-flash", num_hidden_layers=6, compress_ratios=[0] * 7, sliding_window=300),
    "v4 all csa": changed("v4-pro", num_hidden_layers=5, compress_ratios=[4] * 5, num_hash_layers=5, index_topk=33),
    "v4 all hca": changed("v4-pro", num_hidden_layers=4, compress_ratios=[128, 7, 128, 9], q_lora_rank=333),
    "v4 without a bias in the router": changed(
        "v4-flash", num_hidden_layers=5, compress_ratios=[0, 4, 128, 4, 128], topk_method="greedy"
    ),
    "v4.1 with other sources": changed(
        "v4.1-flash", num_hidden_layers=14, compress_ratios=[0, 3, 3, 3, 4, 4, 4, 0, 1, 1, 1, 1, 2, 2],
        kv_source_layer_ids=[1, 4, 8, 12], index_source_layer_ids=[1, 2, 4, 6, 8, 9, 11, 12],
        candidate_source_layer_id=9, candidate_topk_blocks=5, candidate_block_size=4, index_topk=11,
        sliding_window=19, head_dim=96, index_head_dim=64, engram_layer_ids=[0, 3, 12],
        engram_num_embeddings=[1001, 2002, 3003], engram_max_ngram_size=3, engram_n_heads=5, engram_head_dim=32,
    ),
    "v4.1 without candidates": changed(
        "v4.1-flash", candidate_source_layer_id=-1, engram_layer_ids=[], engram_num_embeddings=[], hc_mult=1
    ),
    "v4.1 with candidates in the encoder": changed(
        "v4.1-flash", candidate_source_layer_id=8, index_source_layer_ids=[2, 8, 10, 14, 20, 24], index_topk=40,
        candidate_topk_blocks=3, candidate_block_size=20,
    ),
    "v4.1 windows alone": changed(
        "v4.1-flash", num_hidden_layers=4, compress_ratios=[0] * 4, kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=-1, engram_layer_ids=[2], engram_num_embeddings=[999], num_nextn_predict_layers=0,
        tie_word_embeddings=True,
    ),
    "v4.1 one source of ratio 1": changed(
        "v4.1-flash", num_hidden_layers=6, compress_ratios=[1] * 6, kv_source_layer_ids=[0],
        index_source_layer_ids=[0, 3, 5], candidate_source_layer_id=0, engram_layer_ids=[1, 4],
        engram_num_embeddings=[50, 60], candidate_topk_blocks=2, candidate_block_size=16, index_topk=20,
        topk_method="greedy", n_shared_experts=3,
    ),
    "v4.1 a cache in every layer": changed(
        "v4.1-flash", kv_source_layer_ids=list(range(2, 40)), index_source_layer_ids=list(range(2, 40)),
        candidate_source_layer_id=-1,
    ),
}  # fmt: skip


class Case:
    """One config in three forms: the dict it is loaded from, its plain numbers, and the library's config."""

    def __init__(self, name, data):
        self.name, self.data = name, data
        self.d = flat(data)
        self.layers = layers_of(self.d)
        self.config = load_config(copy.deepcopy(data))


def _cases():
    named = {name: read(name) for name in PRESET_NAMES} | DERIVED
    named |= {
        f"golden {folder.name}": json.loads((folder / "config.json").read_text())
        for folder in sorted(GOLDEN.iterdir())
        if (folder / "config.json").is_file()
    }
    return named


CASES = _cases()
_made = {}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(CASES), indirect=True)
    if "preset" in metafunc.fixturenames:
        metafunc.parametrize("preset", PRESET_NAMES, indirect=True)


def _made_case(name):
    if name not in _made:
        _made[name] = Case(name, CASES[name])
    return _made[name]


@pytest.fixture
def case(request):
    """Each preset, each derived config and each golden one in turn."""
    return _made_case(request.param)


@pytest.fixture
def preset(request):
    """Each of the seven presets in turn."""
    return _made_case(request.param)


@pytest.fixture
def named():
    """A function: the case of that name."""
    return _made_case


@pytest.fixture
def derive():
    """A function: preset name and changes to the flattened dict of its config file."""
    return changed


@pytest.fixture
def released():
    """A function: the JSON of a preset's file, as released."""
    return read


@pytest.fixture(scope="session")
def models():
    """name -> config of the seven presets."""
    return {name: load_config(name) for name in PRESET_NAMES}
