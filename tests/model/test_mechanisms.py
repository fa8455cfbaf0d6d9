"""RoPE, Engram, hyper-connections, compressor, indexer, experts: test vectors, and mistakes that are easily made."""

from types import SimpleNamespace

import pytest
import torch

from flashsim.config import load_config
from flashsim.reading import ConfigError
from model.attention.csa2 import sparse_attention
from model.backend import make_backend
from model.compressor import pool
from model.engram import History, gate, hash_rows, hash_tables, remember
from model.hyper_connection import Mix, coefficients, collapse, expand, sinkhorn
from model.indexer import block_maxima, entries_of, top_blocks, top_k
from model.layers import RMSNorm
from model.moe import Expert, Gate, route
from model.rope import frequencies, rotate, turns
from model.step import Step

RELEASED = load_config("v4.1-flash")


# --- rope: architecture 16.1, pitfalls 1 to 4 -----------------------------------------------------


def test_yarn_frequencies_of_the_release():
    expected = [
        *(1.00000000, 6.87656022e-1, 4.72870805e-1, 3.25172456e-1, 2.23606798e-1, 1.53764561e-1, 1.05737126e-1),
        *(7.27107717e-2, 5.00000000e-2, 3.43828011e-2, 2.36435402e-2, 1.62586228e-2, 1.11803399e-2, 7.68822805e-3),
        *(5.28685632e-3, 3.63553858e-3, 2.26562500e-3, 1.39680129e-3, 8.49689727e-4, 5.08081963e-4, 2.96977778e-4),
        *(1.68179989e-4, 9.08678430e-5, 4.54442323e-5, 1.95312500e-5, 5.37231267e-6, 3.69430316e-6, 2.54040981e-6),
        *(1.74692811e-6, 1.20128563e-6, 8.26071300e-7, 5.68052904e-7),
    ]
    torch.testing.assert_close(frequencies(RELEASED, True), torch.tensor(expected), rtol=5e-7, atol=0)


def test_window_only_layers_have_plain_frequencies():
    expected = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(frequencies(RELEASED, False), expected, rtol=5e-7, atol=0)


def test_rotation_turns_adjacent_pairs_of_the_last_channels():
    frequency = torch.tensor([1.0, 0.5])
    x = torch.arange(1.0, 9.0)
    out = rotate(x, turns(torch.tensor(3), frequency))
    angle = 3 * frequency
    even, odd = x[4::2], x[5::2]
    assert torch.equal(out[:4], x[:4])
    torch.testing.assert_close(out[4::2], even * angle.cos() - odd * angle.sin())
    torch.testing.assert_close(out[5::2], even * angle.sin() + odd * angle.cos())
    back = rotate(out, turns(torch.tensor(3), frequency).conj())
    torch.testing.assert_close(back, x)


# --- norm, hyper-connections: 2.2, 2.3, 16.5 ------------------------------------------------------


def test_norm_of_zeros_is_zeros():
    norm = RMSNorm(8, 1e-20)
    norm.weight.data.fill_(2.0)
    assert not norm(torch.zeros(3, 8)).any()


def test_norm_rounds_once():
    norm = RMSNorm(64, 1e-20, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data.copy_(torch.randn(64, generator=generator))
    x = torch.randn(50, 64, generator=generator).bfloat16()
    exact = norm.weight.float() * x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-20)
    twice = norm.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-20)).bfloat16()
    assert (norm(x).float() - exact).norm() < (twice.float() - exact).norm()


def test_neutral_coefficients():
    h = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    mix = coefficients(h, torch.zeros(24, 32), torch.ones(3), torch.zeros(24), norm_eps=1e-20, iterations=20, eps=1e-6)
    torch.testing.assert_close(mix.pre, torch.full((2, 4), 0.500001))
    torch.testing.assert_close(mix.post, torch.ones(2, 4))
    torch.testing.assert_close(mix.comb, torch.full((2, 4, 4), 0.25), rtol=0, atol=2e-6)


def test_expand_sums_over_the_first_index():
    h, y = torch.eye(4).unsqueeze(0), torch.zeros(1, 4)
    comb = torch.arange(16.0).view(1, 4, 4)
    out = expand(h, y, Mix(torch.zeros(1, 4), torch.ones(1, 4), comb))
    assert torch.equal(out[0], comb[0].T)  # stream k gets sum_j comb[j, k] e_j


@pytest.mark.parametrize("shape", [(3, 4, 4), (9, 4, 4), (1, 1, 4, 4), (2, 3, 3), (0, 4, 4)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_step_by_step(shape, eps, iterations):
    """Few matrices of 4 x 4 run in plain numbers, others in tensors; `eps / rc` -> `eps / rd` there is red here."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    m = torch.softmax(logits, -1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    torch.testing.assert_close(sinkhorn(logits, iterations, eps), m, rtol=1e-13, atol=0)


def test_collapse_weighs_the_streams():
    h = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(3))
    pre = torch.tensor([1.0, 0, 0, 0]).expand(5, 4)
    assert torch.equal(collapse(h, pre), h[:, 0])


# --- Engram: 16.2, pitfalls 13 and 14 -------------------------------------------------------------

ROWS = {
    1: "10250667 16051853 42761335 48437066 64953759 91793642 97213675 124972355 130904169 147647512 174479789 "
    "176217609 193213014 209711443 226459680 248375762 266647502 284737834 292200621 319934002 327756510 339491046 "
    "365830131 381142068",
    14: "13402985 31185432 33324312 50751051 67464774 94528317 100959033 120176944 128818944 152218109 160998468 "
    "191796781 195587060 214176773 229162919 250160180 260141385 283855289 300526134 319101158 333879786 349356468 "
    "360884307 370522085",
}


@pytest.mark.parametrize("layer", [1, 14])
def test_rows_of_the_release(layer):
    rows = hash_rows(torch.tensor([10, 20, 30, 40]), hash_tables(RELEASED)[layer])
    assert rows.tolist() == [int(row) for row in ROWS[layer].split()]


def test_products_stay_below_two_to_the_63():
    for table in hash_tables(RELEASED).values():
        assert int(table.multipliers.max()) * (RELEASED.engram_compressed_vocab_size - 1) < 2**63


def test_wrong_number_of_rows_is_an_error():
    fields = RELEASED.to_dict() | {"engram_num_embeddings": [384006168, 384016683]}
    with pytest.raises(ConfigError, match=r"engram_num_embeddings is 384016683.*384016682 for layer 14"):
        hash_tables(load_config(fields))


def test_blocked_places_are_sticky_and_take_the_mapped_pad():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    images = torch.tensor([[False, False, True, False, False]])
    token_map = torch.arange(10) * 10
    step = Step(load_config("tiny"), [0], [5], torch.device("cpu"))
    history = History.of(step, SimpleNamespace(tokens=tokens, images=images), token_map, pad=20, order=4)
    assert history.grams[0].tolist() == [
        [50, 20, 20, 20],
        [60, 50, 20, 20],
        [20, 20, 20, 20],  # an image token blocks itself
        [80, 20, 20, 20],  # and what lies beyond it
        [90, 80, 20, 20],
    ]


def test_image_tokens_keep_their_streams():
    generator = torch.Generator().manual_seed(5)
    h, kv = torch.randn(2, 4, 8, generator=generator), torch.randn(2, 40, generator=generator)
    out = remember(h, kv, torch.ones(4, 8), torch.ones(4, 8), torch.tensor([True, False]), 1e-20)
    assert torch.equal(out[0], h[0])
    assert not torch.equal(out[1], h[1])


def test_gate_of_the_memory():
    """One stream by hand: sigmoid(sign(t) sqrt(max(|t|, 1e-6))), t the scaled cosine of stream and key."""
    h, key = torch.tensor([[3.0, 4.0]]), torch.tensor([[-1.0, 1.0]])
    t = (3 * -1 * 2 + 4 * 1 * 2) / (12.5**0.5 * 1.0) * 2**-0.5
    expected = torch.sigmoid(torch.tensor(t).sqrt())
    torch.testing.assert_close(gate(h, key, torch.full((1, 2), 2.0), torch.ones(1, 2), 1e-20), expected.view(1))
    opposite = gate(h, -key, torch.full((1, 2), 2.0), torch.ones(1, 2), 1e-20)
    torch.testing.assert_close(opposite, 1 - expected.view(1))


# --- compressor and indexer: 4, 5 -----------------------------------------------------------------


def test_pool_weighs_each_channel_for_itself():
    value = torch.tensor([[[[1.0, 10.0], [3.0, 30.0]]]])
    gate = torch.tensor([[[[0.0, 100.0], [0.0, 0.0]]]])
    torch.testing.assert_close(pool(value, gate), torch.tensor([[[2.0, 10.0]]]))


def test_top_k_breaks_ties_by_position_and_drops_what_is_not_there():
    scores = torch.tensor([0.0, 2.0, 0.0, 0.0, -torch.inf, 0.0])
    assert top_k(scores, 3).tolist() == [0, 1, 2]
    assert top_k(scores, 9).tolist() == [0, 1, 2, 3, 5, -1]
    assert top_k(torch.full((4,), -torch.inf), 2).tolist() == [-1, -1]
    assert top_k(torch.zeros(2, 0), 3).shape == (2, 0)
    assert top_k(torch.tensor([-1.0, -2.0, 0.0]), 2).tolist() == [0, 2]
    assert top_k(torch.zeros(2, 5000), 300).tolist() == [list(range(300))] * 2


def test_candidates_always_keep_the_newest_block():
    scores = torch.tensor([5.0, 4, 3, 3, 9, 9, -7, -torch.inf])
    maxima = block_maxima(scores, 2)
    assert maxima.tolist() == [5, 3, 9, -7]
    assert top_blocks(maxima, 2, torch.tensor(3)).tolist() == [2, 3]
    assert top_blocks(maxima, 2, torch.tensor(2)).tolist() == [0, 2]
    assert block_maxima(scores[:7], 2).tolist() == [5, 3, 9, -7]


def test_entries_of_blocks():
    assert entries_of(torch.tensor([1, -1]), 3).tolist() == [3, 4, 5, -1, -1, -1]


class Plain:
    """A codec that keeps float32 numbers as they are."""

    @staticmethod
    def unpack(records):
        return records


def test_attention_is_one_softmax_with_an_unscaled_sink():
    generator = torch.Generator().manual_seed(4)
    q, window, entries = (torch.randn(n, 2, 8, generator=generator) for n in (3, 5, 6))
    window, entries, sink = window[:, 0], entries[:, 0], torch.tensor([0.3, -2.0])
    slots = torch.tensor([[0, 1], [1, 2], [-1, -1]])
    indices = torch.tensor([[4, -1], [0, 5], [-1, -1]])
    out = sparse_attention(q, window, slots, entries, indices, sink, Plain, Plain)
    for i in range(3):
        keys = torch.cat(
            [window[s : s + 1] for s in slots[i] if s >= 0] + [entries[s : s + 1] for s in indices[i] if s >= 0]
            or [window[:0]]
        )
        for head in range(2):
            weights = torch.exp(keys @ q[i, head] * 8**-0.5)
            expected = weights @ keys / (weights.sum() + torch.exp(sink[head]))
            torch.testing.assert_close(out[i, head], expected)
    assert not out[2].any()  # nothing visible: zeros


# --- experts: 7, pitfall 10 -----------------------------------------------------------------------


def test_the_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[0.0, 0.0, 0.0, 3.0]])
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0])
    experts, weights = route(logits, bias, 2, 1.5)
    assert experts.tolist() == [[1, 3]]
    s = torch.nn.functional.softplus(logits[0, [1, 3]]).sqrt()
    torch.testing.assert_close(weights[0], s / s.sum() * 1.5)


def test_image_tokens_have_a_bias_of_their_own():
    router = Gate(load_config("tiny"), make_backend("reference"), dtype=torch.float32, device="cpu")
    for parameter in router.parameters():
        parameter.data.zero_()
    router.bias.data[:2], router.bias_vl.data[4:] = 1.0, 1.0
    experts, _ = router(torch.zeros(2, 128), torch.tensor([False, True]))
    assert experts.tolist() == [[0, 1], [4, 5]]
    assert router(torch.zeros(1, 128), None)[0].tolist() == [[0, 1]]


def test_equal_experts_the_lower_one_wins():
    assert route(torch.zeros(1, 5), torch.zeros(5), 3, 1.0)[0].tolist() == [[0, 1, 2]]


def test_the_gate_has_no_lower_clamp():
    expert = Expert(1, 1, 2.0, dtype=torch.float32, device="cpu")
    for parameter in expert.parameters():
        parameter.data.fill_(1.0)
    silu = torch.nn.functional.silu
    assert torch.equal(expert(torch.tensor([[5.0]])), silu(torch.tensor([[2.0]])) * 2)
    assert torch.equal(expert(torch.tensor([[-5.0]])), silu(torch.tensor([[-5.0]])) * -2)


def test_routing_weight_stands_before_the_down_projection():
    """In bfloat16 the inner activation is rounded with the weight in it."""
    expert = Expert(2, 2, None, dtype=torch.bfloat16, device="cpu")
    for i, parameter in enumerate(expert.parameters()):
        parameter.data.copy_(torch.randn(2, 2, generator=torch.Generator().manual_seed(i)))
    x, weight = torch.tensor([[1.37, 0.61]]).bfloat16(), torch.tensor([[0.3333]])
    gate, up = expert.w1(x).float(), expert.w3(x).float()
    inner = (torch.nn.functional.silu(gate) * up * weight).bfloat16()
    assert torch.equal(expert(x, weight), expert.w2(inner))
