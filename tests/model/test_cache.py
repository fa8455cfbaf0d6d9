"""The packed cache: bytes equal to `flashsim.kv_cache`, forks, truncation, files, and what bad input gets."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import model.cache
import model.transformer
from flashsim.config import load_config
from flashsim.kv_cache import kv_cache, token_history_bytes
from flashsim.schedule import layer_plan
from model import memory
from model.cache import HEADER, Cache, CacheError
from model.step import Step

CONFIGS = ["tiny", "mini", "tests/data/golden/a32", "tests/data/golden/c32"]


def filled(config, tokens, batch=1, **options):
    """A cache that went through the motions of so many tokens, without a model: counts do not depend on values."""
    cache = Cache(config, batch, **options)
    step = Step(config, [0] * batch, [tokens] * batch, torch.device("cpu"))
    cache.begin(step, torch.zeros(batch, tokens, dtype=torch.int64), None)
    for ring in cache._rings():
        ring.write(step, torch.zeros(batch, tokens, *ring.rows.shape[2:], dtype=ring.rows.dtype))
    cache.advance(step)
    return cache


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_equal_the_prediction_for_every_length(name):
    config = load_config(name)
    assert Cache(config).nbytes() == 0
    for n in range(1, 301):
        cache, predicted = filled(config, n), kv_cache(config, n)
        assert cache.nbytes() == predicted.total()
        for key in ("component", "layer", "tier"):
            assert cache.nbytes(by=key) == predicted.by(key), (n, key)
        assert cache.history_nbytes() == token_history_bytes(config, n)  # 27 bytes from the third token on, or none


def test_bytes_of_the_release():
    config = load_config("v4.1-flash")
    for n in (1, 127, 128, 129, 1001):
        assert filled(config, n).nbytes(by="component") == kv_cache(config, n).by("component")


def test_bytes_of_a_model_that_decodes(tiny, ids):
    """The same with records that a model wrote, one token at a time, over both residues and a full window."""
    cache = tiny.new_cache(2)
    for n in range(1, 40):
        tiny(ids[:, n - 1 : n], cache=cache)
        assert cache.nbytes(by="component", sequence=1) == kv_cache(tiny.config, n).by("component")
        assert cache.nbytes() == 2 * kv_cache(tiny.config, n).total()
    assert cache.reserved_nbytes() >= cache.nbytes()


def test_ragged_bytes_are_the_sum_of_each(tiny, ids):
    cache = tiny.new_cache(2)
    tiny(ids[:, :21], cache=cache, lengths=[21, 6])
    assert cache.lengths == [21, 6]
    assert cache.nbytes() == kv_cache(tiny.config, 21).total() + kv_cache(tiny.config, 6).total()


def test_records_take_the_bytes_of_their_layout():
    config = load_config("v4.1-flash")
    cache = Cache(config)
    assert (cache.main_codec.nbytes, cache.key_codec.nbytes, cache.window_codec.nbytes) == (288, 68, 528)
    assert all(ring.rows.dtype == torch.uint8 for ring in cache.windows.values())
    assert set(cache.sources) == {plan.layer for plan in layer_plan(config) if plan.owns_kv} == {2, 8, 14, 20}


def test_unrounded_cache_keeps_numbers(make_model, ids):
    model = make_model(cache_rounding=False)
    cache = model.new_cache(1)
    full = model(ids[:1, :30])
    parts = [model(ids[:1, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 30))]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-12
    assert cache.nbytes() > kv_cache(model.config, 30).total()
    assert "not rounded" in repr(cache)


@pytest.mark.parametrize("keep", range(22, 31))
def test_truncated_is_as_if_it_had_never_been(tiny, ids, keep):
    """Both residues: window, open group, entries and Engram history of the tokens that are kept."""
    cache = tiny.new_cache(1)
    tiny(ids[:1, :30], cache=cache)
    cache.truncate(keep)
    assert cache.nbytes(by="component") == kv_cache(tiny.config, keep).by("component")
    other = ids[1:, :5]
    expected = tiny(torch.cat([ids[:1, :keep], other], dim=1))[:, keep:]
    got = torch.cat([tiny(other[:, i : i + 1], cache=cache) for i in range(5)], dim=1)
    assert (got - expected).abs().max() < 1e-12


def test_truncate_each_sequence_by_itself(tiny, ids):
    cache = tiny.new_cache(2)
    tiny(ids[:, :20], cache=cache)
    cache.truncate([20, 15])
    got = tiny(ids[:, 50:52], cache=cache)
    for b, n in ((0, 20), (1, 15)):
        expected = tiny(torch.cat([ids[b : b + 1, :n], ids[b : b + 1, 50:52]], dim=1))[:, n:]
        assert (got[b] - expected[0]).abs().max() < 1e-12


@pytest.mark.parametrize("copied", ["as it is", "forked", "saved"])
def test_truncating_twice_remembers_what_was_overwritten(tiny, ids, tmp_path, copied):
    # Mutation: rings that judge by their new end. 92 is as far as it goes, whatever comes between.
    cache = tiny.new_cache(1, rollback=8)
    tiny(ids[:1, :100], cache=cache)
    cache.truncate(95)
    if copied == "forked":
        cache = cache.fork()
    if copied == "saved":
        cache.save(tmp_path / "cache.safetensors")
        cache = Cache.load(tmp_path / "cache.safetensors", tiny.config)
    with pytest.raises(CacheError, match="whose windows go back to length 92"):
        cache.truncate(91)
    cache.truncate(92)
    got = tiny(ids[:1, 92:110], cache=cache)
    assert (got - tiny(ids[:1, :110])[:, 92:]).abs().max() < 1e-12
    cache.truncate(102)


def test_truncate_to_nothing(tiny, ids):
    cache = tiny.new_cache(1)
    tiny(ids[:1, :200], cache=cache)
    cache.truncate(0)
    assert cache.nbytes() == 0
    assert (tiny(ids[1:, :9], cache=cache) - tiny(ids[1:, :9])).abs().max() < 1e-12


def test_truncating_beyond_what_rings_hold_is_an_error(tiny, ids):
    cache = tiny.new_cache(1)
    tiny(ids[:1, :60], cache=cache)
    for wanted, text in (
        (40, "go back to length 52; accepted: from there on, or prefix"),
        (61, "0 to its 60 tokens"),
        (-1, "0 to its 60"),
    ):
        with pytest.raises(CacheError, match=text):
            cache.truncate(wanted)
    assert cache.lengths == [60]
    with pytest.raises(CacheError, match="length has 3 numbers"):
        cache.truncate([1, 2, 3])


def test_fork_is_independent(tiny, ids):
    cache = tiny.new_cache(2)
    tiny(ids[:, :33], cache=cache)
    copy = cache.fork([1, 0, 1])
    before = tiny(ids[:, 33:34], cache=cache.fork())
    tiny(ids[[0, 1, 0], 40:50], cache=copy)
    assert copy.lengths == [43, 43, 43]
    assert torch.equal(tiny(ids[:, 33:34], cache=cache), before)
    with pytest.raises(CacheError, match="sequences is \\[2\\]"):
        cache.fork([2])


def test_a_saved_cache_goes_on_and_back(tiny, ids, tmp_path):
    cache = tiny.new_cache(2)
    tiny(ids[:, :31], cache=cache, lengths=[31, 24])
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors", tiny.config)
    assert loaded.lengths == [31, 24]
    assert loaded.nbytes(by="component") == cache.nbytes(by="component")
    for each in (cache, loaded):
        each.truncate([28, 19])
    assert torch.equal(tiny(ids[:, 60:65], cache=loaded), tiny(ids[:, 60:65], cache=cache))


def test_files_that_are_no_cache(tiny, ids, tmp_path):
    path = tmp_path / "cache.safetensors"
    with pytest.raises(CacheError, match="is no cache file"):
        Cache.load(path, tiny.config)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(CacheError, match="is no cache file"):
        Cache.load(path, tiny.config)
    cache = tiny.new_cache(1)
    tiny(ids[:1, :9], cache=cache)
    cache.save(path)
    with pytest.raises(CacheError, match=r"another config: .*hidden_size"):
        Cache.load(path, load_config("mini"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-10])
    with pytest.raises(CacheError, match="is no cache file"):
        Cache.load(path, tiny.config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lengths", None),
        ("lengths", []),
        ("lengths", [-1]),
        ("lengths", [10**12]),
        ("lengths", ["9"]),
        ("frozen", [0, 0]),
        ("dtype", "load"),
        ("dtype", 3),
        ("cache_rounding", "no"),
        ("rollback", -1),
        ("rings", {}),
        ("rings", {"0.window_kv": [[9], [3], [0]]}),
        ("rings", {"0.window_kv": [[0], [900], [0]]}),
        ("rings", {"0.window_kv": [[0], [3], [9]]}),
        ("rings", {"0.window_kv": [[0], [3]]}),
        ("config", 7),
    ],
)
def test_a_header_that_lies(tiny, ids, tmp_path, field, value):
    """The header of a cache file is believed in nothing: each lie is named, none is an error of Python's."""
    path, cache = tmp_path / "cache.safetensors", tiny.new_cache(1)
    tiny(ids[:1, :9], cache=cache)
    cache.save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[HEADER])
    if isinstance(value, dict) and value:
        value = about["rings"] | value
    save_file(tensors, path, metadata={HEADER: json.dumps(about | {field: value})})
    with pytest.raises(CacheError, match=field):
        Cache.load(path, tiny.config)


def test_a_cache_of_another_model_is_refused(tiny, make_model, ids):
    from model.transformer import InputError

    with pytest.raises(CacheError, match="made for another model"):
        tiny(ids[:1, :3], cache=make_model(cache_rounding=False).new_cache(1))
    with pytest.raises(InputError, match="ids have 2 sequences; accepted: 1"):
        tiny(ids[:, :3], cache=tiny.new_cache(1))
    with pytest.raises(CacheError, match="by is 'size'"):
        tiny.new_cache(1).nbytes(by="size")


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1.5}, {"capacity": -1}, {"rollback": True}])
def test_a_cache_of_no_size(tiny, options):
    ((name, value),) = options.items()
    with pytest.raises(CacheError, match=f"{name} is {value}; accepted: a whole number from"):
        tiny.new_cache(**options)


def test_what_does_not_fit_memory(tiny, ids, monkeypatch):
    """Said before anything is allocated, and the cache is as it was. Without `_require` these end in the allocator."""
    text = r"a cache with room for a batch of 1,000,000,000 needs 8,448,000,000,000 bytes .*, cpu has .* free"
    with pytest.raises(MemoryError, match=text):
        tiny.new_cache(10**9)
    with pytest.raises(MemoryError, match="a cache with room for a batch of 2 needs"):
        tiny.new_cache(2, capacity=10**12)
    cache = tiny.new_cache(2, capacity=5)
    tiny(ids[:, :5], cache=cache)
    monkeypatch.setattr(memory, "free_memory", lambda device: 60_000)
    for module in (model.cache, model.transformer):
        monkeypatch.setattr(module, "MODEST", 0)
    with pytest.raises(MemoryError, match=r"a step of 2 x 60 tokens needs .*; fewer sequences or tokens at a time"):
        tiny(ids[:, :60], cache=cache)
    with pytest.raises(MemoryError, match="a step of 2 x 60 tokens needs"):
        tiny.prefill(ids[:, :60], cache)
    with pytest.raises(MemoryError, match="a batch of 2 needs"):
        tiny.prefill(ids[:, :295], cache, chunk=1)  # the step fits, the cache does not
    assert cache.lengths == [5, 5]
    monkeypatch.undo()
    assert (tiny(ids[:, 5:6], cache=cache) - tiny(ids[:, :6])[:, 5:]).abs().max() < 1e-12
