"""Experts over two processes give the logits of one."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model
from model.fullsize import main
from model.parallel import Ranks, share_experts, start
from model.safetensors_file import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"

WORKER = """
import sys, torch, model
from model.moe import MoE
from model.parallel import share_experts, start
from model.stored_weights import StoredLinear

torch.set_num_threads(1)
ranks, device = start(torch.device("cpu"))
options = eval(sys.argv[2])
lm = model.load(sys.argv[1], **options)
ids = torch.arange(2 * 21).view(2, 21) % 97
expected = lm(ids)
held = sum(len(layer.experts) for layer in lm.modules() if isinstance(layer, MoE))
if sys.argv[3] == "share":
    share_experts(lm, ranks)
else:
    lm = model.load(sys.argv[1], experts=ranks.experts(lm.config.n_routed_experts), **options)
kept = sum(len(layer.experts) - 1 for layer in lm.modules() if isinstance(layer, MoE))
assert 2 * kept == held, (kept, held)
cache = lm.new_cache(2)
parts = [lm(part, cache=cache) for part in ids.split([18, 1, 2], dim=1)]
error = max((out - expected).abs().max().item() for out in (lm(ids), torch.cat(parts, dim=1)))
assert error < 1e-9, error
stacks = [layer.stack for layer in lm.modules() if isinstance(layer, MoE) and layer.stack is not None]
for stack in stacks:
    assert 2 * len(stack.w1[0]) == lm.config.n_routed_experts
print(f"rank {ranks.rank} of {ranks.number}: {len(stacks)} stacks, fine")
"""


def torchrun(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a32", {}),
        ("aq", {"packed": True}),
        ("aq", {"packed": True, "activation_rounding": True}),
        ("aq", {"offload": True}),
    ],
)
@pytest.mark.parametrize("way", ["share", "read"])
def test_two_ranks_give_the_logits_of_one(tmp_path, name, options, way):
    """Mutations: the sum over ranks left out; experts of other ranks counted as the first of mine."""
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{WORKER}")
    process = torchrun(script, GOLDEN / name, options, way)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.count("fine") == 2


def test_the_full_size_run_over_two_ranks_writes_each_row_once(tmp_path):
    out = tmp_path / "rows.csv"
    run = [
        "-m",
        "model.fullsize",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--backend",
        "reference",
        "--engram-rows",
        "64",
    ]
    process = torchrun(*run, "--tie-experts", "--contexts", "16,40", "--out", out)
    assert process.returncode == 0, process.stderr[-3000:]
    rows = list(csv.DictReader(out.open()))
    assert [(row["context"], row["ranks"]) for row in rows] == [("16", "2"), ("40", "2")]


def test_the_full_size_run_takes_real_weights(tmp_path):
    """Over two ranks and alone, packed and from the files: the same command, the weights of a folder."""
    out, run = tmp_path / "rows.csv", ["--device", "cpu", "--backend", "reference", "--weights", GOLDEN / "aq"]
    process = torchrun("-m", "model.fullsize", *run, "--contexts", "16", "--seconds", "0", "--out", out)
    assert process.returncode == 0, process.stderr[-3000:]
    assert main([*map(str, run), "--offload", "--contexts", "16", "--seconds", "0", "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["weights"], row["tied"]) for row in rows] == [
        ("2", "folder", "False"),
        ("1", "offloaded", "False"),
    ]


def test_experts_that_are_not_there():
    for wrong in (range(0, 99), range(2, 2), range(0, 4, 2)):
        with pytest.raises(CheckpointError, match="experts is range"):
            model.load(GOLDEN / "aq", experts=wrong)
    with pytest.raises(CheckpointError, match="experts is for checkpoint folders"):
        model.load("tiny", experts=range(2))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_ranks_hold_adds_up(monkeypatch, backend):
    """One layer, rank after rank in one process; the kernel skips the experts of other ranks."""
    lm = model.load(GOLDEN / "aq", backend=backend, packed=True, activation_rounding=True)
    layer = lm.layers[0].ffn
    x = torch.randn(1, 3, lm.config.hidden_size, generator=torch.Generator().manual_seed(0))
    x = x.to(lm.backend.arithmetic(lm.dtype, lm.device))
    whole, shared = layer(x), layer.shared_experts(x)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda out: None)
    parts = []
    for rank in range(2):
        lm = model.load(GOLDEN / "aq", backend=backend, packed=True, activation_rounding=True)
        parts.append(share_experts(lm, Ranks(rank, 2)).layers[0].ffn(x) - shared)
    assert (sum(parts) + shared - whole).abs().max() < 1e-5 * whole.abs().max()
    assert all(part.abs().max() > 0 for part in parts)


def test_one_process_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks, device = start(torch.device("cpu"))
    assert ranks == Ranks(0, 1) and device.type == "cpu" and ranks.agree("so") == "so"
    lm = model.load("tiny")
    experts = len(lm.layers[0].ffn.experts)
    assert len(share_experts(lm, ranks).layers[0].ffn.experts) == experts
    assert Ranks(1, 2).experts(6) == range(3, 6)
    with pytest.raises(ValueError, match="ranks is 4; accepted: a divisor of n_routed_experts, 6"):
        Ranks(0, 4).experts(6)
