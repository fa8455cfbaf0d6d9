"""The attention of V4, layer by layer: window, HCA and CSA against the formulas written out (earlier generations 5)."""

import math
from dataclasses import replace

import pytest
import torch

from flashsim.config import load_config
from flashsim.schedule import layer_plan
from model.attention.csa import CompressedSparseAttention
from model.attention.hca import HeavilyCompressedAttention, visible_entries
from model.attention.window import WindowAttention
from model.random_weights import randomise
from model.rope import frequencies
from model.step import Step
from model.v4_cache import V4Cache
from model.v4_compressor import pool
from model.v4_transformer import ATTENTION

CPU = torch.device("cpu")


def v4(**changes):
    """The config of the golden checkpoint with changes; its layers have ratios 0, 4, 16, 4, 16."""
    return replace(load_config("tests/data/golden/v4"), **changes)


def layer(config, number, seed=0):
    """The attention of one layer in float64 with random weights, and the plan it has."""
    plan = layer_plan(config)[number]
    return randomise(ATTENTION[plan.attention](config, plan, dtype=torch.float64, device=CPU), seed)


def run(attention, x, sizes=None, cache_rounding=False):
    """[B, S, D] of the rows x, in calls of these sizes."""
    config, out, low = attention.config, [], 0
    cache = V4Cache(config, len(x), dtype=torch.float64, cache_rounding=cache_rounding)
    for size in sizes or [x.shape[1]]:
        step = Step(config, [low] * len(x), [size] * len(x), CPU)
        cache.begin(step)
        out.append(attention(x[:, low : low + size], step, cache))
        cache.advance(step)
        low += size
    return torch.cat(out, dim=1)


def rms(v, weight, eps):
    return v * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + eps) * weight


def turn(v, config, position, compressed, sign=1):
    """One vector, its last channels turned in adjacent pairs."""
    angle = sign * (torch.tensor(position).float() * frequencies(config, compressed)).double()
    v, r = v.clone(), config.qk_rope_head_dim
    even, odd = v[..., -r::2].clone(), v[..., -r + 1 :: 2].clone()
    v[..., -r::2] = even * angle.cos() - odd * angle.sin()
    v[..., -r + 1 :: 2] = even * angle.sin() + odd * angle.cos()
    return v


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def rounded(v, group, values, floor):
    """QDQ of 1.4 by looking for the nearest value; a tie goes to the even code."""
    out = []
    for block in v.split(min(group, len(v))):
        wanted = torch.tensor(max(float(block.abs().max()), floor)).float() * torch.tensor(1 / values[-1]).float()
        scale = 2.0 ** math.ceil(math.log2(wanted))
        for x in (block / scale).tolist():
            code = min(range(len(values)), key=lambda c: (abs(values[c] - abs(x)), c % 2))
            out.append(math.copysign(values[code] * scale, x))
    return torch.tensor(out, dtype=torch.float64)


def record(v, config):
    """A window or entry vector with all channels but the rotary ones in FP8, groups of 64."""
    plain = config.head_dim - config.qk_rope_head_dim
    return torch.cat((rounded(v[:plain], 64, E4M3, 1e-4), v[plain:])) if plain else v


def written_out(attention, x, entries, keep=lambda v, config: v):
    """The layer for x [S, D] by the formulas of 5.2 and 5.5; entries(i) gives the entry vectors that query i sees."""
    config, compressed = attention.config, attention.plan.compress_ratio > 0
    heads, width, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    kv = [rms(row @ attention.wkv.weight.T, attention.kv_norm.weight, eps) for row in x]
    kv = [keep(turn(row, config, i, compressed), config) for i, row in enumerate(kv)]
    out = []
    for i, row in enumerate(x):
        qr = rms(row @ attention.wq_a.weight.T, attention.q_norm.weight, eps)
        q = rms((qr @ attention.wq_b.weight.T).view(heads, width), 1.0, eps)
        q = turn(q, config, i, compressed)
        keys = torch.stack([*kv[max(0, i - config.sliding_window + 1) : i + 1], *entries(i)])
        e = torch.exp(q @ keys.T * width**-0.5)
        o = (e @ keys) / (e.sum(dim=1, keepdim=True) + torch.exp(attention.attn_sink)[:, None])
        o = turn(o, config, i, compressed, sign=-1)
        groups = o.view(config.o_groups, -1)
        blocks = attention.wo_a.weight.view(config.o_groups, config.o_lora_rank, -1)
        t = torch.cat([g @ block.T for g, block in zip(groups, blocks, strict=True)])
        out.append(t @ attention.wo_b.weight.T)
    return torch.stack(out)


def hca_entries(attention, x):
    """Every entry by 5.3: a softmax over the tokens of each group, channel by channel."""
    c, m, config = attention.compressor, attention.plan.compress_ratio, attention.config
    u, z = x @ c.wkv.weight.T, x @ c.wgate.weight.T
    made = []
    for t in range(len(x) // m):
        weight = torch.softmax(z[t * m : (t + 1) * m] + c.ape, dim=0)
        entry = (weight * u[t * m : (t + 1) * m]).sum(dim=0)
        made.append(turn(rms(entry, c.norm.weight, config.rms_norm_eps), config, t * m, True))
    return made


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SHAPES = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 64, "o_groups": 1},
    {"num_attention_heads": 6, "o_groups": 3, "head_dim": 24, "qk_rope_head_dim": 24},
    {"o_groups": 4, "qk_rope_head_dim": 2, "compress_ratios": (0, 4, 3, 4, 1)},
]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("number", [2, 4])
def test_hca_is_the_formula(changes, number):
    attention = layer(v4(**changes), number)
    assert isinstance(attention, HeavilyCompressedAttention)
    x, m = noise(37, 48), attention.plan.compress_ratio
    made = hca_entries(attention, x)
    expected = written_out(attention, x, lambda i: made[: (i + 1) // m])
    # float32 keeps the inputs of groups, and angles to their last bit; measured 2e-7
    assert (run(attention, x[None])[0] - expected).abs().max() < 2e-6


@pytest.mark.parametrize("changes", SHAPES)
def test_window_layer_is_the_formula(changes):
    attention = layer(v4(**changes), 0)
    assert type(attention) is WindowAttention
    x = noise(37, 48)
    assert (run(attention, x[None])[0] - written_out(attention, x, lambda i: [])).abs().max() < 1e-6


def test_window_counts_the_query_itself():
    """Mistake 14: 16 tokens with the own one. A change 16 back is not seen, 15 back is."""
    attention, x = layer(v4(), 0), noise(1, 30, 48)
    before = run(attention, x)
    for at, seen in ((29, True), (14, True), (13, False)):
        other = x.clone()
        other[0, at] += 1
        assert ((run(attention, other) - before)[0, 29].abs().max() > 1e-6) == seen


def test_mean_where_gates_are_equal():
    """9.3: without gate and bias an entry is the mean of its tokens."""
    value = noise(1, 2, 16, 80)
    assert torch.allclose(pool(value, torch.zeros_like(value), torch.tensor([0]), False), value.mean(dim=2))


def test_an_entry_is_visible_to_its_last_token():
    """9.3, mistake 13: i = 126 sees none of 128, i = 127 one."""
    step = Step(v4(), [0], [257], CPU)
    seen = (visible_entries(step, 128)[0] >= 0).sum(dim=1)
    assert seen[[0, 126, 127, 254, 255, 256]].tolist() == [0, 0, 1, 1, 2, 2]


def test_no_entry_yet_is_window_attention():
    """9.5: with every entry masked what remains is the window, by the compressed table."""
    config = v4(rope_theta=160000.0, rope_scaling=None, compress_ratios=(0, 4, 64, 4, 16))
    window, hca = layer(config, 0), layer(config, 2)
    x = noise(1, 63, 48)
    assert torch.equal(run(window, x), run(hca, x))
    x = noise(1, 64, 48)
    assert not torch.allclose(run(window, x)[:, 63], run(hca, x)[:, 63])


def test_sinks():
    """9.5, mistake 15: minus infinity is plain softmax; a sink is neither scaled nor does it have a value."""
    attention, x = layer(v4(sliding_window=64), 0), noise(1, 20, 48)
    with_sink = run(attention, x)
    attention.attn_sink.fill_(-torch.inf)
    assert (run(attention, x)[0] - written_out(attention, x[0], lambda i: [])).abs().max() < 1e-6
    assert not torch.allclose(run(attention, x), with_sink)
    attention.attn_sink.fill_(1e4)  # takes all weight, and gives nothing
    assert run(attention, x).abs().max() < 1e-9


@pytest.mark.parametrize("number", [0, 2])
def test_calls_of_any_size_agree(number):
    attention, x = layer(v4(), number), noise(2, 70, 48)
    whole = run(attention, x)
    for sizes in ([1] * 70, [15, 1, 1, 16, 17, 20], [33, 37], [16, 16, 16, 22]):
        assert (run(attention, x, sizes) - whole).abs().max() < 1e-12


# --- CSA: overlapping groups, the indexer with keys of its own, the selection -----------------------------------------


def csa_entries(compressor, x):
    """Every entry by 5.3: one softmax over 8 slots, the group before with its first halves, the own with its second."""
    config, m = compressor.config, compressor.ratio
    u = x @ compressor.wkv.weight.T
    z = torch.stack([x[i] @ compressor.wgate.weight.T + compressor.ape[i % m] for i in range(len(x))])
    d, made = u.shape[1] // 2, []
    for t in range(len(x) // m):
        slots = [(u[i, :d], z[i, :d]) for i in range(m * (t - 1), m * t) if t > 0]
        slots += [(u[i, d:], z[i, d:]) for i in range(m * t, m * (t + 1))]
        value, gate = (torch.stack(part) for part in zip(*slots, strict=True))
        entry = (torch.softmax(gate, dim=0) * value).sum(dim=0)
        made.append(turn(rms(entry, compressor.norm.weight, config.rms_norm_eps), config, m * t, True))
    return made


def picks(attention, x, i, keys, keep=lambda v: v):
    """The entries of query i by 5.4, the best first."""
    config, indexer = attention.config, attention.indexer
    qr = rms(x[i] @ attention.wq_a.weight.T, attention.q_norm.weight, config.rms_norm_eps)
    q = (qr @ indexer.wq_b.weight.T).view(config.index_n_heads, -1)
    q = torch.stack([keep(head) for head in turn(q, config, i, True)])
    w = x[i] @ indexer.weights_proj.weight.T * (config.index_head_dim * config.index_n_heads) ** -0.5
    scores = [float((torch.relu(q @ key) * w).sum()) for key in keys[: (i + 1) // indexer.ratio]]
    return sorted(range(len(scores)), key=lambda t: (-scores[t], t))[: config.index_topk]


CSA_SHAPES = [
    {},
    {"index_topk": 1, "index_n_heads": 3, "sliding_window": 3},
    {"index_topk": 100, "index_head_dim": 16},
    {"compress_rate_csa": 2, "compress_ratios": (0, 2, 16, 2, 16), "index_head_dim": 20, "o_groups": 1},
    {"compress_rate_csa": 5, "compress_ratios": (0, 5, 4, 5, 4), "qk_rope_head_dim": 4, "head_dim": 20},
]


@pytest.mark.parametrize("changes", CSA_SHAPES)
def test_csa_is_the_formula(changes):
    attention = layer(v4(**changes), 1)
    assert isinstance(attention, CompressedSparseAttention)
    x = noise(37, 48)
    made, keys = csa_entries(attention.compressor, x), csa_entries(attention.indexer.compressor, x)
    expected = written_out(attention, x, lambda i: [made[t] for t in picks(attention, x, i, keys)])
    assert (run(attention, x[None])[0] - expected).abs().max() < 2e-6  # measured 3e-7


def rows(entry_of):
    """[1, G, 8, 2 W] of u where token i has first half entry_of(i, 0) and second half entry_of(i, 1), W = 1."""
    group = lambda t: [[entry_of(i, 0), entry_of(i, 1)] for i in range(4 * (t - 1), 4 * (t + 1))]  # noqa: E731
    return torch.tensor([[group(t) for t in range(3)]], dtype=torch.float64)


def test_first_halves_feed_the_next_group():
    """9.3 and mistakes 9, 11: entry 0 is the mean of ub(0..3), entry 1 of ua(0..3) and ub(4..7) together."""
    value = rows(lambda i, half: float(i if half else 100 + i))
    made = pool(value, torch.zeros_like(value), torch.tensor([0]), True)[0, :, 0]
    assert made[0] == (0 + 1 + 2 + 3) / 4
    assert made[1] == (100 + 101 + 102 + 103 + 4 + 5 + 6 + 7) / 8
    assert made[2] == (104 + 105 + 106 + 107 + 8 + 9 + 10 + 11) / 8


def test_a_large_bias_picks_one_token():
    """9.3 and mistake 10: row 3 of the second half gives ub(4t + 3); row 0 of the first half gives ua(4t - 4)."""
    value = rows(lambda i, half: float(i if half else 100 + i))
    second = rows(lambda i, half: 1e3 if half == 1 and i % 4 == 3 else 0.0)
    assert pool(value, second, torch.tensor([0]), True)[0, :, 0].tolist() == [3.0, 7.0, 11.0]
    first = rows(lambda i, half: 1e3 if half == 0 and i % 4 == 0 else 0.0)
    assert pool(value, first, torch.tensor([0]), True)[0, :, 0].tolist() == [1.5, 100.0, 104.0]


def test_nothing_before_group_0_even_when_rows_are_left_over():
    """A released implementation mixes in what the sequence before left; groups that start at 0 see minus infinity."""
    value, gate = noise(1, 2, 8, 6), noise(1, 2, 8, 6, seed=1)
    other = value.clone()
    other[:, 0, :4] = 1e6
    a, b = (pool(v, gate, torch.tensor([0]), True) for v in (value, other))
    assert torch.equal(a[:, 0], b[:, 0])
    c, d = (pool(v, gate, torch.tensor([3]), True) for v in (value, other))
    assert not torch.equal(c[:, 0], d[:, 0])


def test_what_each_query_selects():
    """9.3: 0, 1, 2 visible entries; never more than there are, never a later one, -1 for none."""
    attention, x = layer(v4(index_topk=3), 1), noise(1, 30, 48)
    step, cache = Step(attention.config, [0], [30], CPU), V4Cache(v4(index_topk=3), dtype=torch.float64)
    cache.begin(step)
    _, selected = attention.entries(x, attention.q_norm(attention.wq_a(x)), step, cache)
    for i in range(30):
        chosen = [t for t in selected[0, i].tolist() if t >= 0]
        assert len(chosen) == min((i + 1) // 4, 3) and chosen == sorted(set(chosen))
        assert all(t < (i + 1) // 4 for t in chosen)


def test_scores_that_are_all_zero_select_the_lowest():
    attention, x = layer(v4(index_topk=2), 1), noise(1, 30, 48)
    attention.indexer.weights_proj.weight.zero_()
    step, cache = Step(attention.config, [0], [30], CPU), V4Cache(v4(index_topk=2), dtype=torch.float64)
    cache.begin(step)
    _, selected = attention.entries(x, attention.q_norm(attention.wq_a(x)), step, cache)
    assert selected[0, 29].tolist() == [0, 1]


def sylvester(v):
    """H of 1.5 by its matrix."""
    w = torch.ones(1, 1, dtype=torch.float64)
    while len(w) < len(v):
        w = torch.cat((torch.cat((w, w), dim=1), torch.cat((w, -w), dim=1)))
    return w @ v * len(v) ** -0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 144, "index_head_dim": 64, "index_topk": 2},
        {"head_dim": 48, "index_head_dim": 16, "index_n_heads": 5, "sliding_window": 5},
    ],
)
def test_rounded_csa_and_hca_are_the_formula(changes):
    """Records in FP8, index queries and keys in FP4 after the Hadamard rotation, by 1.4 and 1.5 value by value."""
    config, x = v4(**changes), noise(29, 48)
    fp4 = lambda v: rounded(sylvester(v), 32, E2M1, 6 * 2.0**-126)  # noqa: E731
    csa, hca = layer(config, 1), layer(config, 2)
    made = [record(entry, config) for entry in csa_entries(csa.compressor, x)]
    keys = [fp4(key) for key in csa_entries(csa.indexer.compressor, x)]
    expected = written_out(csa, x, lambda i: [made[t] for t in picks(csa, x, i, keys, fp4)], record)
    got = run(csa, x[None], cache_rounding=True)[0]
    assert (got - expected).abs().max() < 2e-6  # measured 4e-7
    assert (got - run(csa, x[None])[0]).abs().max() > 1e-3
    made = [record(entry, config) for entry in hca_entries(hca, x)]
    expected = written_out(hca, x, lambda i: made[: (i + 1) // 16], record)
    assert (run(hca, x[None], cache_rounding=True)[0] - expected).abs().max() < 2e-6


@pytest.mark.parametrize("changes", CSA_SHAPES[:1] + CSA_SHAPES[3:])
def test_csa_calls_of_any_size_agree(changes):
    attention, x = layer(v4(**changes), 1), noise(2, 43, 48)
    whole = run(attention, x)
    for sizes in ([1] * 43, [3, 1, 1, 4, 7, 5, 22], [21, 22], [4, 8, 12, 19]):
        assert (run(attention, x, sizes) - whole).abs().max() < 1e-12
