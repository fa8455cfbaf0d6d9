"""Entries and reaches against the definitions token by token, and what the drawings say."""

import pytest

from flashsim import load_config
from flashsim.drawing import FigureError
from flashsim.pictures.compressed import feeds, groups_picture, reach, reach_picture


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("tokens", "ratio"), [(1, 1), (3, 4), (4, 4), (17, 4), (6, 2), (5, 1)])
def test_feeds_are_the_tokens_that_change_an_entry(tokens, ratio, overlap):
    torch, v4_compressor = pytest.importorskip("torch"), pytest.importorskip("model.v4_compressor")
    groups, width = tokens // ratio, 3
    found = {(feed.entry, feed.token) for feed in feeds(tokens, ratio, overlap=overlap)}
    changed = set()
    for token in range(tokens):
        rows = [torch.zeros(tokens, width * (1 + overlap)) for _ in range(2)]
        rows[1][token] = 1.0
        made = []
        for value in rows:
            group = value[: groups * ratio].unflatten(0, (groups, ratio)) if groups else value.new_zeros(0, ratio, 1)
            if overlap and groups:
                group = torch.cat((torch.cat((torch.zeros_like(group[:1]), group[:-1])), group), dim=1)
            if groups:
                made.append(
                    v4_compressor.pool(group[None], torch.zeros_like(group)[None], torch.tensor([0]), overlap)[0]
                )
        if groups:
            changed |= {(entry, token) for entry in (made[0] != made[1]).any(dim=1).nonzero().flatten().tolist()}
    assert found == changed
    assert all(feed.before == (feed.token // ratio < feed.entry) for feed in feeds(tokens, ratio, overlap=overlap))


@pytest.mark.parametrize(("window", "ratio"), [(16, 128), (128, 128), (1, 4), (5, 4)])
def test_reach_is_what_the_model_sees(window, ratio):
    torch, hca = pytest.importorskip("torch"), pytest.importorskip("model.attention.hca")
    step = hca.Step(load_config("ladder-v4-flash"), [0], [300], torch.device("cpu"))
    entries = hca.visible_entries(step, ratio)[0]
    slots = step.window(0, (0,), window)[0]
    for position in (0, 3, 4, 127, 128, 299):
        found = reach(position, window=window, ratio=ratio)
        assert found.entries == [e for e in entries[position].tolist() if e >= 0]
        assert list(found.window) == [s for s in slots[position].tolist() if s >= 0]
        assert found.vectors == len(found.window) + len(found.entries)
        assert list(found.open_group) == [t for t in range(position + 1) if t // ratio not in found.entries]
        assert found.missed == [t for t in found.open_group if t not in found.window]


def test_a_window_of_a_whole_group_misses_nothing():
    """The released window, 128, is as long as a group of HCA: what has no entry yet is in the window."""
    config = load_config("v4-flash")
    assert not any(reach(p, window=config.sliding_window, ratio=128).missed for p in range(600))
    assert reach(254, window=config.sliding_window - 1, ratio=128).missed == []
    assert reach(254, window=config.sliding_window - 2, ratio=128).missed == [128]


def test_chosen_entries_and_no_entries():
    found = reach(19, window=2, ratio=4, chosen=[3, 0, -1])
    assert (found.entries, found.visible, found.vectors) == ([0, 3], 5, 4)
    assert found.missed == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17]
    alone = reach(9, window=4)
    assert (alone.entries, alone.missed) == ([], [0, 1, 2, 3, 4, 5])


def test_pictures_say_what_they_show():
    drawing = groups_picture(14, 4, overlap=True)
    assert "3 entries of 14 tokens" in drawing.alt and "Entry 1: tokens 0 to 7." in drawing.alt
    assert len(drawing.rows) == 4 + 8 + 8 and drawing.svg() == groups_picture(14, 4, overlap=True).svg()
    assert groups_picture(3, 4, overlap=False).rows == [{"entry": "none complete yet"}]
    lanes = {"window": reach(99, window=8), "CSA": reach(99, window=8, ratio=4, chosen=[1, 2])}
    drawing = reach_picture(lanes, "One query")
    assert [row["tokens_missed"] for row in drawing.rows] == [92, 84]
    assert "CSA: 8 window records, 2 of 25 entries, 84 earlier tokens in neither." in drawing.alt
    assert "</svg>" in drawing.svg()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: feeds(0, 4, overlap=True), "tokens"),
        (lambda: feeds(4, 0, overlap=False), "ratio"),
        (lambda: reach(-1, window=4), "position"),
        (lambda: reach(3, window=0), "window"),
        (lambda: reach(3, window=True), "window"),
        (lambda: reach(3, window=4, ratio=4, chosen=[1]), "chosen"),
        (lambda: reach_picture({}, "none"), "lanes"),
    ],
)
def test_bad_input_names_the_field(call, field):
    with pytest.raises(FigureError, match=f"^{field} is .*; accepted: "):
        call()
