"""The module itself: parameter counts, FLOPs of a step, the schedule as a table, and fields it refuses."""

import time

import pytest
import torch

from flashsim.config import SMALL_PRESETS, load_config
from flashsim.flops import decode_flops
from flashsim.params import parameters
from flashsim.reading import ConfigError
from model.backend import BackendError
from model.flop_counter import REASONS, FlopCounter
from model.random_weights import randomise
from model.tensor_table import tensors
from model.transformer import InputError, Transformer

PARTS = {
    "embedding": ["embed."],
    "lm_head": ["head."],
    "final_norm": ["norm."],
    "layer_norms": ["attn_norm.", "ffn_norm."],
    "hyper_connection": ["hc_"],
    "q_projection": ["attn.wq_a.", "attn.wq_b.", "attn.q_norm."],
    "kv_projection": ["attn.wkv.", "attn.kv_norm."],
    "attention_sink": ["attn.attn_sink"],
    "o_projection_group": ["attn.wo_a."],
    "o_projection_output": ["attn.wo_b."],
    "compressor": ["attn.compressor."],
    "indexer_key": ["attn.indexer.wk.", "attn.indexer.k_norm."],
    "indexer_query": ["attn.indexer.wq_b."],
    "indexer_weights": ["attn.indexer.weights_proj."],
    "engram_tables": ["engram.embed."],
    "engram_projection": ["engram."],
    "router": ["ffn.gate."],
    "routed_experts": ["ffn.experts."],
    "shared_experts": ["ffn.shared_experts."],
}


def part_of(name):
    name = name.split(".", 2)[2] if name.startswith("layers.") else name
    return next(part for part, prefixes in PARTS.items() if name.startswith(tuple(prefixes)))


@pytest.mark.parametrize("preset", ["v4.1-flash", *SMALL_PRESETS])
def test_parameters_by_part(preset):
    start = time.time()
    model = Transformer(preset, device="meta", dtype=torch.bfloat16)
    assert time.time() - start < 20  # measured 2 s for the release, 46,000 experts
    counts = {}
    for name, parameter in model.named_parameters():
        counts[part_of(name)] = counts.get(part_of(name), 0) + parameter.numel()
    report = parameters(model.config)
    assert counts == report.by("component")
    assert sum(counts.values()) == report.total()


def test_released_counts():
    """V4.1 architecture 14.2: backbone and Engram."""
    model = Transformer("v4.1-flash", device="meta", dtype=torch.bfloat16)
    counts = {"engram": 0, "backbone": 0}
    for name, parameter in model.named_parameters():
        counts["engram" if ".engram." in name else "backbone"] += parameter.numel()
    assert counts == {"backbone": 551_566_180_464, "engram": 196_928_504_320}


@pytest.mark.parametrize("preset", ["v4.1-flash", *SMALL_PRESETS])
def test_names_and_shapes_are_those_of_a_checkpoint(preset):
    model = Transformer(preset, device="meta", dtype=torch.bfloat16)
    expected = {name: spec for name, spec in tensors(model.config).items() if spec.part == "text"}
    expected = {name: spec for name, spec in expected.items() if not name.startswith("image_")}
    assert {n: tuple(p.shape) for n, p in model.state_dict().items()} == {n: s.shape for n, s in expected.items()}
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, spec in expected.items() if spec.kind == "f32"}


@pytest.mark.parametrize("preset", SMALL_PRESETS)
@pytest.mark.parametrize("tokens", [1, 2, 9, 40, 63, 64, 300, 301])
def test_counted_flops_equal_the_analytic_ones(make_model, ids, preset, tokens):
    model = make_model(preset, torch.float32)
    cache = model.new_cache(1)
    line = torch.cat([ids[:1], ids[1:]], dim=1)
    if tokens > 1:
        model(line[:, : tokens - 1], cache=cache, last=True)
    with FlopCounter(model) as counter:
        model(line[:, tokens - 1 : tokens], cache=cache, last=True)
    rows = {row.component: row for row in counter.compare(decode_flops(model.config, tokens))}
    assert {name for name, row in rows.items() if row.reason} <= set(REASONS)
    assert rows["attention_selected"].counted == rows["attention_selected"].predicted > 0 or tokens == 1
    assert "other" not in rows


def test_a_wrong_count_is_an_error(make_model, ids):
    model = make_model("tiny", torch.float32)
    with FlopCounter(model) as counter:
        model(ids[:1, :1], last=True)
    counter.count("router", 2)
    with pytest.raises(ValueError, match=r"router: .* FLOPs counted"):
        counter.compare(decode_flops(model.config, 1))


def test_index_keys_add_up_over_a_group(make_model, ids):
    model = make_model("tiny", torch.float32)
    cache, counted = model.new_cache(1), 0
    for n in range(2):
        with FlopCounter(model) as counter:
            model(ids[:1, n : n + 1], cache=cache)
        counted += counter.flops["indexer_key"]
    assert counted == 2 * decode_flops(model.config, 1).by("component")["indexer_key"]


def test_counting_changes_nothing(make_model, ids):
    model = make_model()
    with FlopCounter(model):
        counted = model(ids[:1, :30])
    assert (counted - model(ids[:1, :30])).abs().max() < 1e-12


def test_explain_names_every_role(tiny):
    table = tiny.explain(300)
    assert [row.role for row in table.layers] == [plan.role for plan in tiny.plans]
    assert {row.role for row in table.layers} == {"window", "full", "reindex", "reuse"}
    text = str(table)
    assert "candidates of 4" in text
    assert "Engram table 1" in text
    assert "selection of 6" in text
    head = decode_flops(tiny.config, 300).by("component")["lm_head"]
    assert sum(row.flops for row in table.layers) + head == decode_flops(tiny.config, 300).total()
    assert len(table.to_dict()) == 8


def test_repr_names_what_was_chosen():
    text = repr(Transformer("tiny", device="meta", cache_rounding=False))
    for word in ("tiny", "backend='reference'", "dtype=float32", "device=meta", "cache_rounding=False"):
        assert word in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"engram_num_embeddings": [384, 553]}, "engram_num_embeddings is 553; accepted: 552 for layer 3"),
        ({"engram_compressed_vocab_size": 0}, "engram_compressed_vocab_size is 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling.rope_type is 'linear'; accepted: yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
            },
            "rope_scaling.attention_factor is 1.2; accepted: 1",
        ),
        ({"head_dim": 72}, "head_dim is 72; accepted: .* multiples of its block of"),
        ({"index_head_dim": 40}, "index_head_dim is 40"),
        (
            {"qk_rope_head_dim": 128, "head_dim": 128, "index_head_dim": 64},
            "index_head_dim is 64; accepted: .* at least qk_rope_head_dim",
        ),
    ],
)
def test_fields_that_it_does_not_compute_are_refused(change, text):
    config = load_config(load_config("tiny").to_dict() | change)
    with pytest.raises(ValueError, match=text):
        Transformer(config, device="meta")


def test_other_families_and_backends():
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v4'; accepted: deepseek_v41"):
        Transformer("v4-flash", device="meta")
    with pytest.raises(BackendError, match="backend is 'cuda'; accepted: reference, triton"):
        Transformer("tiny", backend="cuda", device="meta")


def test_token_map_is_needed_and_checked(ids):
    model = randomise(Transformer("tiny"))
    with pytest.raises(InputError, match="token_map is missing"):
        model(ids[:1, :3])
    with pytest.raises(InputError, match="one id for each of 320 tokens"):
        model.set_token_map([0, 1])
    with pytest.raises(InputError, match="0\\.\\.160; accepted: 0 to 159"):
        model.set_token_map([160] + [0] * 319)


def test_random_weights_come_from_their_seed():
    first, again, other = (randomise(Transformer("tiny"), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)
