"""The trace: it changes nothing, and what it records is what the model attended to."""

import pytest
import torch

from flashsim.pictures.selection import select
from model.trace import Trace


@pytest.fixture(scope="module")
def traced(tiny, ids):
    with Trace(tiny) as trace:
        logits = tiny(ids[:, :60], lengths=[60, 41])
    return trace, logits


def test_tracing_changes_nothing(tiny, ids, traced):
    assert torch.equal(traced[1], tiny(ids[:, :60], lengths=[60, 41]))
    assert "index_scores" not in vars(tiny.backend) and len(traced[0]) == 8


def test_selections_follow_from_the_scores(tiny, traced):
    trace, config = traced[0], tiny.config
    for plan in tiny.plans:
        seen = trace[plan.layer]
        if plan.kv_source is None:
            assert seen.selected is None and seen.scores is None
            continue
        if not plan.selects:
            assert torch.equal(seen.selected, trace[plan.selection_source].selected) and seen.scores is None
            continue
        for b, rows in ((0, 60), (1, 41)):
            for p in range(rows):
                pool = None if not plan.scores_candidates else trace[4].candidates[b, p].tolist()
                size, keep = config.candidate_block_size, config.candidate_topk_blocks * plan.builds_candidates
                chosen = select(
                    seen.scores[b, p].tolist(), config.index_topk, position=p, ratio=plan.compress_ratio,
                    block_size=size, keep_blocks=keep, pool=pool,
                )  # fmt: skip
                assert chosen.entries == [t for t in seen.selected[b, p].tolist() if t >= 0]
                if keep:
                    assert chosen.pool == [c for c in seen.candidates[b, p].tolist() if c >= 0]
                if pool:
                    outside = [t for t in range(p + 1) if not chosen.in_pool(t)]
                    assert all(seen.scores[b, p, t] == -torch.inf for t in outside)


def test_windows_and_rows(tiny, traced):
    trace, window = traced[0], tiny.config.sliding_window
    for layer in range(8):
        assert trace[layer].window[0].tolist() == [min(p + 1, window) for p in range(60)]
        assert trace[layer].window[1, 41:].sum() == 0 and trace.rows[layer] == 101


def test_a_prefill_runs_the_decoder_half_for_the_tail(tiny, ids):
    with Trace(tiny) as trace:
        tiny.prefill(ids[:1, :100], tail=10, chunk=32)
    assert [trace.rows[layer] for layer in range(8)] == [100] * 4 + [10] * 4
    assert trace[7].positions.tolist() == [[96, 97, 98, 99]]


def test_a_trace_within_a_trace(tiny, ids):
    with Trace(tiny) as outer:
        with Trace(tiny) as inner:
            tiny(ids[:, :20])
        tiny(ids[:, :9])
    assert inner.rows[2] == 2 * 20 and outer.rows[2] == 2 * 29
    torch.testing.assert_close(inner[2].scores[:, :9, :4], outer[2].scores)
    assert not vars(tiny.backend).keys() & {"index_scores", "sparse_attention"}


def test_what_it_refuses(tiny):
    with pytest.raises(TypeError, match="Linear"):
        Trace(torch.nn.Linear(2, 2))
    with pytest.raises(KeyError, match="none yet"):
        Trace(tiny)[3]
