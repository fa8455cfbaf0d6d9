"""Training: gradients are those of the forward, recall is learnt through entries alone, a run resumes where it was."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import model
from flashsim.kv_cache import kv_cache
from model.backend import Backend
from model.differentiable import Selection
from model.safetensors_file import CheckpointError
from model.train import (
    HEADER,
    IGNORED,
    STATE_FILE,
    Recall,
    Settings,
    Trainer,
    TrainingError,
    main,
    reach,
    recall_config,
)


@pytest.mark.parametrize("rounding", [True, False])
def test_a_forward_in_training_is_the_forward(make_model, ids, rounding):
    lm = make_model(cache_rounding=rounding)  # tiny: every role, Engram, a candidate pool
    expected = lm(ids[:, :70])
    made = lm.train()(ids[:, :70])
    assert torch.equal(made, expected)


def test_gradients_are_slopes(make_model, ids):
    """Where nothing is rounded; a weight of each mechanism, moved a little along its gradient."""
    lm = make_model(cache_rounding=False).train()
    names = ["embed.weight", "layers.1.hc_attn_fn", "layers.2.attn.compressor.wgate.weight", "layers.2.attn.attn_sink"]
    for name in [*names, "layers.3.engram.embed.weight", "layers.4.attn.wkv.weight", "layers.6.ffn.gate.weight"]:
        parameter = lm.get_parameter(name).requires_grad_(True)
        loss = lm(ids[:, :40]).square().mean()
        loss.backward()
        slope, move = parameter.grad.norm(), parameter.grad / parameter.grad.norm() * 1e-4
        with torch.no_grad():
            parameter -= move
            measured = (loss - lm(ids[:, :40]).square().mean()) / 1e-4
            parameter += move
        parameter.requires_grad_(False)
        assert slope > 0
        assert measured.item() == pytest.approx(slope.item(), rel=0.02), (
            name
        )  # rotation and open groups are float32; seen: 0.005


def test_rounding_passes_straight_through():
    cache = model.load("tiny").train().new_cache()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for codec in (cache.main_codec, cache.key_codec, cache.window_codec):
        rounded = codec.unpack(codec.pack(x))
        assert not torch.equal(rounded, x)
        (slope,) = torch.autograd.grad((rounded * 3).sum(), x)
        assert torch.equal(slope, torch.full_like(x, 3))
    with pytest.raises(TypeError, match=r"eval\(\)"):
        cache.nbytes()


def test_a_sequence_tells_then_asks():
    task = Recall(pairs=3, gap=4)
    ids, targets = task.batch(2, seed=1)
    tokenizer = model.load("tiny").tokenizer
    for row, wanted in zip(ids, targets, strict=True):
        text = tokenizer.decode(row.tolist())
        told = {text[i]: text[i + 1] for i in range(0, 6, 2)}
        assert len(text) == task.tokens and len(told) == 3 and text[6:10] == "...."
        assert {text[i]: text[i + 1] for i in range(10, 16, 2)} == told
        asked = (wanted != IGNORED).nonzero().flatten().tolist()
        assert asked == [10, 12, 14]
        assert [tokenizer.decode([int(wanted[p])]) for p in asked] == [text[p + 1] for p in asked]
    assert torch.equal(task.batch(2, seed=1)[0], ids)
    assert not torch.equal(task.batch(2, seed=2)[0], ids)


def test_windows_do_not_reach_the_answer(make_model):
    """A change of a told digit moves no logit of the questions without entries, and moves them with entries."""
    task = Recall()
    ids, targets = task.batch(1, seed=0)
    other = ids.clone()
    other[0, 2 * task.pairs - 1] = ids[0, 1] if ids[0, 1] != ids[0, 2 * task.pairs - 1] else ids[0, 0]
    asked = targets[0] != IGNORED
    for entries in (False, True):
        config = recall_config(entries=entries)
        assert reach(config) < task.gap
        lm = make_model(config)
        moved = (lm(ids) - lm(other))[0, asked].abs().max()
        assert moved > 1e-3 if entries else moved < 1e-9


@pytest.mark.slow
def test_recall_is_learnt_through_entries_alone():
    """Seen with seed 0: recall 100 % with entries after 100 steps, 10 % without, where chance is 10 %."""
    run = Trainer.new()
    record = run.run(110)
    assert record[0].loss > 5 and record[-1].loss < 0.5  # from log(320) = 5.8 to below log(10) = 2.3
    assert run.evaluate()[1] > 0.9  # index_topk of the entries are read
    assert run.model.config.index_topk < run.task.tokens // 2 - 8
    for name, parameter in run.model.named_parameters():
        if name.endswith("indexer.weights_proj.weight"):
            parameter.neg_()
    assert run.evaluate()[1] < 0.3  # the worst of them do not help
    without = Trainer.new(recall_config(entries=False))
    record = without.run(60)
    assert record[-1].loss < 3  # it has learnt that a digit comes
    loss, recall = without.evaluate()
    assert loss > 2.2 and recall < 2 * without.task.chance


def test_the_cache_of_a_trained_model_is_counted(tmp_path):
    run = Trainer.new()
    run.run(1)
    cache = run.model.new_cache()
    run.model(run.task.batch(1, 0)[0], cache=cache)
    assert cache.nbytes() == kv_cache(run.model.config, run.task.tokens).total()


def test_a_resumed_run_is_the_run(tmp_path):
    settings = Settings(batch_size=4, seed=3)
    whole, half = (Trainer.new(None, Recall(pairs=2, gap=4), settings) for _ in range(2))
    whole.run(4)
    half.run(2)
    half.save(tmp_path / "run")
    again = Trainer.resume(tmp_path / "run")
    assert again.settings == settings and again.task == half.task and again.record == half.record
    again.run(4)
    assert again.record == whole.record
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.model.named_parameters())
    assert Trainer.new(None, half.task, Settings(batch_size=4, seed=4)).step() != whole.record[0]


def test_what_is_trained():
    run = Trainer.new(settings=Settings(batch_size=2))
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    run.run(2)
    still = {name for name, p in run.model.named_parameters() if torch.equal(p, before[name])}
    assert all(name.endswith("bias_vl") or ".experts." in name for name in still)
    assert not any(p.requires_grad for p in run.model.parameters()) and not run.model.training
    assert {type(m.backend) for m in run.model.modules() if hasattr(m, "backend")} == {Backend}


def test_the_indexer_loss_is_the_divergence_from_attention(make_model):
    """Query by query, over the entries that it sees; and the indexer gets a gradient from it."""
    lm, selection, seen = make_model(recall_config()), Selection(), []
    for module in lm.modules():
        if hasattr(module, "backend"):
            module.backend = selection
    attend = selection.sparse_attention

    def watch(q, window, slots, entries, indices, *rest):
        before, out = selection.loss, attend(q, window, slots, entries, indices, *rest)
        if entries is not None:
            seen.append((q, entries, indices, selection._picked, selection.loss - before))
        return out

    selection.sparse_attention = watch
    indexer = [p.requires_grad_(True) for name, p in lm.named_parameters() if ".indexer." in name]
    lm.train()(Recall().batch(1, 0)[0][:, :9])
    assert len(seen) == 3  # two layers that select, one that reuses
    for queries, entries, indices, picked, loss in seen:
        by_hand = 0.0
        for q, rows, scores in zip(queries, indices, picked, strict=True):
            visible = rows >= 0
            if visible.any():
                p = (q @ entries[rows[visible]].T / q.shape[-1] ** 0.5).softmax(-1).mean(0)
                by_hand += (p * (p.log() - scores[visible].log_softmax(-1))).sum().item() / len(queries)
        assert loss.item() == pytest.approx(by_hand, rel=1e-9) and by_hand > 0
    assert all(slope.abs().sum() > 0 for slope in torch.autograd.grad(selection.loss, indexer))


def test_what_is_refused(tmp_path, capsys):
    with pytest.raises(TrainingError, match="pairs is 17; accepted"):
        Recall(pairs=17)
    with pytest.raises(TrainingError, match=r"V4\.1 model"):
        Trainer.new("ladder-v1")
    with pytest.raises(CheckpointError, match=r"training\.safetensors"):
        Trainer.resume(model.save(model.load("tiny"), tmp_path / "other"))
    for arguments, part in (
        (["--resume", str(tmp_path), "--seed", "1"], "--seed is given with --resume"),
        (["--steps", "-1"], "--steps is -1"),
        (["--out", str(tmp_path)], "is there already; accepted: a new folder"),
    ):
        assert main(arguments) == 1
        assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 1.5),
        ("batch_size", True),
        ("learning_rate", float("nan")),
        ("learning_rate", -1.0),
        ("learning_rate", "fast"),
        ("warmup", -3),
        ("weight_decay", float("inf")),
        ("index_weight", -1),
        ("clip", 0),
        ("bias_speed", float("nan")),
        ("seed", -1),
        ("seed", 2**31),
    ],
)
def test_settings_are_checked(field, value):
    with pytest.raises(TrainingError, match=f"^{field} is .*; accepted: "):
        Settings(**{field: value})


def test_numbers_of_steps_and_sequences_are_checked():
    run = Trainer.new(None, Recall(pairs=1, gap=1), Settings(batch_size=1))
    for steps in (-1, 1.5, None, float("nan")):
        with pytest.raises(TrainingError, match="steps is "):
            run.run(steps)
    for size in (0, 1.5):
        with pytest.raises(TrainingError, match="size is "):
            run.evaluate(size)
    with pytest.raises(TrainingError, match="a sequence has 4,100 tokens; accepted: up to max_position_embed"):
        Trainer.new(None, Recall(pairs=1, gap=4096))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    run = Trainer.new(None, Recall(pairs=1, gap=1), Settings(batch_size=1))
    run.run(2)
    return run.save(tmp_path_factory.mktemp("runs") / "run")


def changed(folder, about=lambda about: None, tensors=lambda tensors: None):
    """Its training state with something else in the header, or among the tensors."""
    path = folder / STATE_FILE
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = about(header) or header
    tensors(state)
    return save(state, {HEADER: header if isinstance(header, str) else json.dumps(header)})


NAME = "embed.weight/exp_avg"


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        (lambda about: about["settings"].update(batch_size="x"), lambda t: None),
        (lambda about: about["settings"].update(learning_rate=float("nan")), lambda t: None),
        (lambda about: about["settings"].pop("seed"), lambda t: None),
        (lambda about: about["task"].pop("gap"), lambda t: None),
        (lambda about: about.update(record=about["record"] * 2), lambda t: None),
        (lambda about: about.update(record=[]), lambda t: None),
        (lambda about: about.update(record=["abcd", "efgh"]), lambda t: None),
        (lambda about: "[" * 50_000, lambda t: None),
        (lambda about: "null", lambda t: None),
        (lambda about: None, lambda t: t.pop(NAME)),
        (lambda about: None, lambda t: t.clear()),
        (lambda about: None, lambda t: t.update({NAME: t[NAME][:1].clone()})),
        (lambda about: None, lambda t: t.update({NAME: t[NAME].int()})),
        (lambda about: None, lambda t: t.update({"embed.weight/step": torch.tensor(-1.0)})),
        (lambda about: None, lambda t: t.update({"embed.weight/step": torch.tensor(3.0)})),
        (lambda about: None, lambda t: t.update({"embed.weight/other": t.pop(NAME)})),
        (lambda about: None, lambda t: t.update({"nothing": t.pop(NAME)})),
        (lambda about: None, lambda t: t.update({"a/exp_avg": t.pop(NAME)})),
    ],
)
def test_a_damaged_run_is_one_sentence(run_folder, tmp_path, capsys, about, tensors):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / STATE_FILE).write_bytes(changed(run_folder, about, tensors))
    assert main(["--resume", str(folder), "--steps", "3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {STATE_FILE} ") and error.count("\n") == 1 and len(error) < 300


def test_a_run_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    run = Trainer.new(None, Recall(pairs=1, gap=1), Settings(batch_size=1))
    run.run(1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("model.train.asdict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file", "file/below", "a" * 300])
def test_a_place_that_cannot_be_written_is_said_before_training(tmp_path, capsys, out):
    (tmp_path / "file").touch()
    assert main(["--steps", "1", "--every", "1", "--out", str(tmp_path / out)]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("error: ") and said.err.count("\n") == 1 and "; accepted: " in said.err


def test_the_command(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["--steps", "2", "--every", "1", "--pairs", "2", "--window-only", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "step     2" in said and "windows reach back 12" in said
    assert main(["--resume", out, "--steps", "3", "--every", "1"]) == 0
    assert "step     3" in capsys.readouterr().out
