"""Loading: golden logits whichever way weights are kept, random weights, and a checkpoint larger than memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model
from flashsim.config import load_config
from flashsim.reading import ConfigError
from model import loading, memory
from model.backend import make_backend
from model.checkpoint import CONFIG_FILE, INDEX_FILE, QUANTISATION, Checkpoint
from model.layers import Embedding, GroupedLinear, Linear
from model.safetensors_file import CheckpointError, encode_header
from model.saving import config_to_json
from model.stored_weights import StoredEmbedding, StoredLinear, StoredWeight, store
from model.tensor_table import stored, tensors

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
REFERENCE = make_backend("reference")
WAYS = [{}, {"packed": True}, {"offload": True}]


@pytest.mark.parametrize("options", WAYS, ids=["expanded", "packed", "offload"])
@pytest.mark.parametrize(("name", "tolerance"), [("a32", 1e-4), ("c32", 1e-4), ("aq", 1e-3)])
def test_golden_logits(name, tolerance, options):
    golden = load_file(GOLDEN / name / "golden.safetensors")
    logits = model.load(GOLDEN / name, **options)(golden["input_ids"])
    assert logits.dtype == torch.float32
    assert (logits - golden["logits"]).abs().max() < tolerance


@pytest.mark.parametrize("name", ["a32", "aq"])
def test_every_matrix_can_stay_in_the_file(name, monkeypatch):
    monkeypatch.setattr(loading, "OFFLOAD_BYTES", 1)
    golden = load_file(GOLDEN / name / "golden.safetensors")
    lm = model.load(GOLDEN / name, offload=True)
    assert isinstance(lm.embed, StoredEmbedding) and isinstance(lm.head, StoredLinear)
    assert (lm(golden["input_ids"]) - golden["logits"]).abs().max() < 1e-3


def test_packed_weights_matter():
    """The packed checkpoint is another model than the float one: loading ignores no scale."""
    golden = load_file(GOLDEN / "aq" / "golden.safetensors")
    assert (model.load(GOLDEN / "a32")(golden["input_ids"]) - golden["logits"]).abs().max() > 0.05


@pytest.mark.parametrize("options", WAYS[1:], ids=["packed", "offload"])
def test_stored_weights_give_the_same_logits_bit_for_bit(options):
    ids = torch.arange(40)[None] * 7 % 160
    assert torch.equal(model.load(GOLDEN / "aq", **options)(ids), model.load(GOLDEN / "aq")(ids))


def test_what_stays_packed_and_what_is_mapped():
    packed, mapped = (model.load(GOLDEN / "aq", **options) for options in WAYS[1:])
    for lm, where in ((packed, "in memory"), (mapped, "mapped")):
        assert isinstance(lm.layers[1].engram.embed, StoredEmbedding)
        assert isinstance(lm.layers[2].ffn.experts[3].w2, StoredLinear)
        assert where in repr(lm.layers[2].ffn.experts[3].w2)
    assert isinstance(packed.layers[0].attn.wo_a, StoredLinear) and packed.layers[0].attn.wo_a.groups == 2
    assert isinstance(mapped.layers[0].attn.wo_a, GroupedLinear)  # small, so it is loaded
    kinds = {type(module) for module in packed.modules() if isinstance(module, StoredLinear | StoredEmbedding)}
    assert kinds == {StoredLinear, StoredEmbedding}


def test_activation_rounding_changes_packed_models_alone():
    ids = torch.arange(20)[None]
    plain = model.load(GOLDEN / "aq")(ids)
    for options in WAYS[1:]:
        rounded = model.load(GOLDEN / "aq", activation_rounding=True, **options)
        assert (rounded(ids) - plain).abs().max() > 1e-4
        assert "activation_rounding=True" in repr(rounded)
    with pytest.raises(CheckpointError, match="activation_rounding needs packed weights"):
        model.load(GOLDEN / "aq", activation_rounding=True)


@pytest.mark.parametrize("name", ["a32", "c32", "draft", "vision"])
def test_every_tensor_is_used_or_named(name):
    lm = model.load(GOLDEN / name)
    checkpoint = Checkpoint(GOLDEN / name)
    state = lm.state_dict()
    assert set(state) | set(lm.other_tensors) == set(checkpoint.headers) and not set(state) & set(lm.other_tensors)
    file = load_file(GOLDEN / name / "model.safetensors")
    assert all(torch.equal(value, file[key]) for key, value in state.items())


def test_state_dict_keys_are_the_table_of_every_preset():
    for name in ("tiny", "mini", "v4.1-flash"):
        config = load_config(name)
        lm = model.load(name, device="meta")
        table = {key: spec for key, spec in tensors(config).items() if spec.part == "text"}
        assert {key: tuple(value.shape) for key, value in lm.named_parameters()} == {
            k: s.shape for k, s in table.items()
        }
        assert all(parameter.is_meta for parameter in lm.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_types(dtype):
    lm = model.load(GOLDEN / "aq", dtype=dtype)
    assert lm.layers[0].attn.wkv.weight.dtype == dtype
    assert lm.layers[0].hc_attn_fn.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(lm(torch.tensor([[1, 2, 3, 4]]))).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_types_that_do_not_compute(dtype):
    with pytest.raises(CheckpointError, match="dtype is torch"):
        model.load(GOLDEN / "c32", dtype=dtype)


# --- random weights ---------------------------------------------------------------------------------------------------


def test_a_preset_has_the_weights_of_its_seed():
    ids = torch.tensor([[5, 6, 7, 8]])
    first, again, other = model.load("tiny", seed=1), model.load("tiny", seed=1), model.load("tiny", seed=2)
    assert torch.equal(first(ids), again(ids))
    assert (first(ids) - other(ids)).abs().max() > 0.1
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    model.load("tiny")
    assert torch.rand(1) == before  # the caller's generator is left alone


def test_configs_and_paths_give_random_weights(tmp_path):
    fields = json.loads((GOLDEN / "c32" / CONFIG_FILE).read_text())
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    ids = torch.tensor([[1, 2, 3]])
    logits = [model.load(source)(ids) for source in (fields, load_config(fields), str(tmp_path / "mine.json"))]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_names_that_do_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="did you mean tiny"):
        model.load("tinny")
    with pytest.raises(CheckpointError, match="is not a folder"):
        model.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="random weights; offload is for checkpoint folders"):
        model.load("tiny", offload=True)


@pytest.mark.parametrize(
    ("folder", "experts", "accepted"),
    [
        ("aq", [0, 1], "a range of the 8 routed experts"),
        ("aq", 3, "a range of the 8 routed experts"),
        ("aq", range(9), "a range of the 8 routed experts"),
        ("v4", range(2), "None, as model_type is deepseek_v4"),
    ],
)
def test_experts_that_cannot_be_held(folder, experts, accepted):
    with pytest.raises(CheckpointError) as error:
        model.load(GOLDEN / folder, experts=experts)
    assert str(error.value).startswith(f"experts is {experts}; accepted: {accepted}")


def test_devices_that_are_not_there():
    with pytest.raises(CheckpointError, match=r"device is 'gpu'; accepted: cpu, cuda, cuda:N or meta"):
        model.load("tiny", device="gpu")
    with pytest.raises(CheckpointError, match=r"device is cuda:99, and PyTorch finds \d+ GPUs; accepted: cpu"):
        model.load(GOLDEN / "c32", device="cuda:99")


def test_what_does_not_fit_memory(monkeypatch):
    with pytest.raises(
        MemoryError, match=r"v4.1-flash with its weights needs 2,993,978,739,136 bytes .*, cpu has .* free$"
    ):
        model.load("v4.1-flash")
    monkeypatch.setattr(memory, "free_memory", lambda device: 3_000_000)
    with pytest.raises(MemoryError, match=r"aq with its weights needs .*; packed=True .*, offload=True leaves"):
        model.load(GOLDEN / "aq")
    assert model.load(GOLDEN / "aq", packed=True)
    monkeypatch.setattr(memory, "free_memory", lambda device: None)  # a system that does not say
    assert model.load(GOLDEN / "aq")


@pytest.mark.parametrize("options", WAYS[1:], ids=["packed", "offload"])
def test_explain_counts_stored_parameters(options):
    """Seen red with the parameters of the modules alone."""
    expanded, kept = model.load(GOLDEN / "aq").explain(100), model.load(GOLDEN / "aq", **options).explain(100)
    assert kept.to_dict() == expanded.to_dict()


def test_random_weights_pack_as_a_checkpoint_of_them_would(tmp_path, monkeypatch):
    """Seen red with w1 and w3 of a stack exchanged."""
    monkeypatch.setattr(loading, "engram_table", lambda tokenizer, vocab, size: [i % size for i in range(vocab)])
    model.save(model.load("tiny"), tmp_path / "tiny", "quantised", tokenizer=model.load("tiny").tokenizer)
    ids = torch.arange(30)[None] * 7 % 160
    for rounding in (False, True):
        options = {"packed": True, "activation_rounding": rounding}
        made, read = model.load("tiny", **options), model.load(tmp_path / "tiny", **options)
        read.set_token_map(made.token_map)
        made.load_state_dict(read.state_dict())  # the file has the other tensors in bfloat16
        assert torch.equal(made(ids), read(ids))
        assert repr(made.layers) == repr(read.layers)


# --- stored weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers.0.attn.wq_b.weight", "layers.0.ffn.experts.1.w2.weight", "head.weight"])
@pytest.mark.parametrize("mapped", [True, False])
def test_bands_of_a_linear_layer(name, mapped, monkeypatch):
    from model import stored_weights

    checkpoint = Checkpoint(GOLDEN / "aq")
    weight = StoredWeight.read(checkpoint, name, torch.float64, mapped=mapped)
    rows, width = weight.shape
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = x @ checkpoint.weight(name).double().T
    for elements in (1, 33 * width, 10**9):
        monkeypatch.setattr(stored_weights, "BAND_ELEMENTS", elements)
        out = store(Linear(width, rows), weight, "cpu", REFERENCE)(x)
        assert torch.allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize("elements", [1, 40 * 64, 10**9])
def test_bands_of_a_grouped_layer_that_end_inside_a_group(elements, monkeypatch):
    from model import stored_weights

    monkeypatch.setattr(stored_weights, "BAND_ELEMENTS", elements)
    checkpoint = Checkpoint(GOLDEN / "aq")
    name = "layers.0.attn.wq_b.weight"  # 128 rows, here as 8 groups of 16: a band of 32 rows holds two
    weight = StoredWeight.read(checkpoint, name, torch.float64, mapped=True)
    rows, width = weight.shape
    whole = GroupedLinear(8, width, rows // 8, dtype=torch.float64)
    whole.weight.data.copy_(checkpoint.weight(name, torch.float64))
    x = torch.randn(2, 8 * width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.allclose(store(whole, weight, "cpu", REFERENCE)(x), whole(x), rtol=1e-12)


@pytest.mark.parametrize("folder", ["a32", "aq"])
def test_rows_of_a_table(folder):
    checkpoint = Checkpoint(GOLDEN / folder)
    name = "layers.1.engram.embed.weight"
    weight = StoredWeight.read(checkpoint, name, torch.float32, mapped=True)
    ids = torch.tensor([[0, 383], [5, 5]])
    layer = store(Embedding(*weight.shape), weight, "cpu", REFERENCE)
    assert torch.equal(layer(ids), checkpoint.weight(name)[ids])
    weight.forget()
    assert torch.equal(layer(ids), checkpoint.weight(name)[ids])


# --- a checkpoint larger than memory ----------------------------------------------------------------------------------

BIG = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 768,
    "num_experts_per_tok": 6,
    "engram_vocab_size": 4_000_000,
    "engram_head_dim": 64,
}


def sparse_checkpoint(folder, target_bytes):
    """A packed checkpoint of at least `target_bytes`, its files sparse: zeros but for the header."""
    from model.engram import _primes

    config = load_config("tiny").to_dict() | BIG
    columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    primes = _primes(config["engram_vocab_size"])
    config["engram_num_embeddings"] = [sum(next(primes) for _ in range(columns)) for _ in config["engram_layer_ids"]]
    config["num_nextn_predict_layers"] = 0
    config = load_config(config)
    folder.mkdir()
    root = config_to_json(config) | {"quantization_config": QUANTISATION}
    (folder / CONFIG_FILE).write_text(json.dumps(root))
    headers = stored(tensors(config))
    shards, size = [{}], 0
    for name, header in headers.items():
        if size + header.nbytes > 5e9 and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = header
        size += header.nbytes
    places = {}
    for i, shard in enumerate(shards):
        path = folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        head = encode_header(shard)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(header.nbytes for header in shard.values()))
        places |= dict.fromkeys(shard, path.name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    total = sum(header.nbytes for header in headers.values())
    assert total >= target_bytes, total
    return total


CHILD = """
import resource, sys, torch
torch.set_num_threads(1)
import model
from model import loading, memory
loading.engram_table = lambda tokenizer, vocab, size: [i % size for i in range(vocab)]
loading.load_tokenizer = lambda path: None
loading.Checkpoint.inside = lambda self, name: None
lm = model.load(sys.argv[1], offload=True)
logits = lm(torch.tensor([[3]]))
assert logits.shape == (1, 1, lm.config.vocab_size) and torch.isfinite(logits).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_twenty_gigabytes_in_under_four(tmp_path):
    total = sparse_checkpoint(tmp_path / "big", 20 * 10**9)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "big")],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 4 * 10**9
    print(f"{total:,} bytes of checkpoint, {int(run.stdout):,} bytes resident")
