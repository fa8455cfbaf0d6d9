"""The full-size run at small size: weights, filled caches, a step that stays in place, sweeps that go on."""

import csv

import pytest
import torch

from flashsim.config import load_config
from flashsim.kv_cache import kv_cache
from model import fullsize
from model.fullsize import (
    DecodeStep,
    build,
    code_deviation,
    fill_codes,
    filled_cache,
    main,
    random_planes,
    weight_bytes,
)
from model.random_weights import spread
from model.stored_weights import stored_weights
from model.tensor_table import TensorSpec
from model.weight_formats import unpack

CPU = torch.device("cpu")
COMMAND = ["--model", "tiny", "--device", "cpu", "--backend", "reference", "--engram-rows", "64", "--seconds", "0"]


@pytest.fixture(scope="module")
def tiny():
    return build(load_config("tiny"), "reference", torch.float32, CPU, tie_experts=True, engram_rows=64)


def held_bytes(model):
    """Bytes of parameters and stored weights, shared ones once; plain numbers as two bytes, as they are released."""
    planes = [plane for weight in stored_weights(model).values() for plane in (weight.weight, weight.scale)]
    shared = {plane.data_ptr(): plane.nbytes for plane in planes}
    wide = ("bias", "bias_vl", "attn_sink", "_fn", "_base", "_scale")
    plain = sum(p.numel() * (4 if name.endswith(wide) else 2) for name, p in model.named_parameters())
    return sum(shared.values()) + plain


@pytest.mark.parametrize(("tie", "rows"), [(True, 64), (False, 64), (True, None)])
def test_weights_take_the_bytes_that_were_asked_for(tie, rows):
    config = load_config("tiny")
    model = build(config, "reference", torch.float32, CPU, tie_experts=tie, engram_rows=rows)
    assert held_bytes(model) == weight_bytes(config, tie_experts=tie, engram_rows=rows)


def test_the_released_shape_fits_one_device_tied():
    config = load_config("v4.1-flash")
    assert weight_bytes(config, tie_experts=True, engram_rows=2**20) < 20e9
    whole = weight_bytes(config, tie_experts=False, engram_rows=None)
    assert 500e9 < whole < 510_286_023_000  # what is missing is drafter and vision


def test_more_than_there_is_says_what_would_fit(monkeypatch):
    monkeypatch.setattr("model.memory.free_memory", lambda device: 1000)
    with pytest.raises(
        MemoryError, match=r"tiny with its weights needs .* --tie-experts and --engram-rows 65536 it needs"
    ):
        build(load_config("tiny"), "reference", torch.float32, CPU)


@pytest.mark.parametrize(("kind", "shape"), [("fp8", (96, 160)), ("fp4", (40, 128)), ("table", (50, 64))])
def test_random_planes_are_numbers_of_the_size_asked_for(kind, shape):
    generator = torch.Generator().manual_seed(0)
    values = unpack(*random_planes(TensorSpec(shape, kind), generator, 0.05), kind)
    assert values.shape == shape and torch.isfinite(values).all()
    assert 0.03 < values.float().std() < 0.08  # the scale is the nearest power of two
    codes = torch.empty(4096, dtype=torch.uint8)
    fill_codes(codes, generator, e4m3=True)
    drawn = codes.view(torch.float8_e4m3fn).float()
    assert abs(drawn.std() / code_deviation("fp8") - 1) < 0.05 and (drawn < 0).any()


def test_parameters_are_spread_as_in_small_models():
    assert spread("layers.0.attn_norm.weight", 8) == (1, 0.1) and spread("head.weight", 64) == (0, 0.125)


@pytest.mark.parametrize("context", [1, 37, 300])
def test_a_filled_cache_has_the_bytes_of_the_formula(tiny, context):
    cache = filled_cache(tiny, 2, context)
    for b in range(2):
        assert cache.nbytes(by="component", sequence=b) == kv_cache(tiny.config, context).by("component")
    assert torch.isfinite(tiny(torch.zeros(2, 1, dtype=torch.int64), cache=cache)).all()


def test_a_step_that_stays_in_place_is_an_ordinary_step(tiny):
    """Called three times it gives what decode gives once. Mutation: rings that are not put back."""
    ids = torch.randint(0, 160, (2, 60), generator=torch.Generator().manual_seed(1))
    caches = [tiny.new_cache(2, capacity=64) for _ in range(2)]
    for cache in caches:
        tiny(ids[:, :59], cache=cache)
    expected = tiny(ids[:, 59:], cache=caches[0], last=True)
    step = DecodeStep(tiny, caches[1], ids[:, 59:])
    for _ in range(3):
        assert torch.equal(step(), expected)
    assert caches[1].lengths == [60, 60]


def test_a_sweep_goes_on_behind_its_rows(tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.csv"
    assert main([*COMMAND, "--contexts", "16,40", "--out", str(out)]) == 0
    assert main([*COMMAND, "--contexts", "16,40,60", "--batches", "1,2", "--limit", "0", "--out", str(out)]) == 0
    assert "run again to go on with batch 1, context 60" in capsys.readouterr().out
    measured = []
    monkeypatch.setattr(
        fullsize, "measure", lambda model, batch, context, *rest: measured.append((batch, context)) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        fullsize._sweep(fullsize_options(out))
    rows = list(csv.DictReader(out.open()))
    assert [row["context"] for row in rows] == ["16", "40"] and measured == [(1, 60)]
    assert all(row["counted_flops"] > row["formula_flops"] and row["device"] == "CPU" for row in rows)


def fullsize_options(out):
    return fullsize.options([*COMMAND, "--contexts", "16,40,60", "--out", str(out)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "v3"], "model_type is 'deepseek_v3'; accepted: deepseek_v41"),
        (["--backend", "jax"], "backend is 'jax'"),
        (["--contexts", "many"], "many"),
        (["--batches", "0"], "batches is 0; accepted: whole numbers from 1"),
        (["--batches", "²"], "batches is ²; accepted: whole numbers from 1"),
        (["--experts", "1"], "num_experts_per_tok"),
        (["--profile", "rows.csv"], "profile needs a GPU"),
        (["--device", "cuda"], "finds no GPU"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, text):
    if text == "finds no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([*COMMAND, *arguments]) == 1
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


# The model is built on no device: its own check of backend and device says nothing.
def test_kernels_need_a_gpu_or_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr("model.backend.TritonBackend._interpreted", lambda self: False)
    assert main([*COMMAND, "--backend", "triton"]) == 1
    assert capsys.readouterr().err.startswith("error: device is cpu with backend triton")


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    out = tmp_path / "other.csv"
    out.write_text("a,b\n1,2\n")
    assert main([*COMMAND, "--contexts", "16", "--out", str(out)]) == 1
    assert "has other columns" in capsys.readouterr().err and out.read_text() == "a,b\n1,2\n"


def test_flops_that_differ_are_said_and_the_row_has_both(tiny, capsys, monkeypatch):
    row = fullsize.measure(tiny, 1, 40, 0)
    assert capsys.readouterr().err == "" and row["counted_flops"] > row["formula_flops"]
    right = fullsize.decode_flops
    monkeypatch.setattr(fullsize, "decode_flops", lambda config, context: right(config, context + 8))
    fullsize.measure(tiny, 1, 40, 0)
    assert "warning: indexer_scores" in capsys.readouterr().err
