"""Training: AdamW on a task whose answers lie outside every window, small enough for a lesson on a laptop.

    python -m model.train                                     # half a minute: loss and recall as they go
    python -m model.train --window-only                       # without compressed entries it only guesses
    python -m model.train --steps 200 --out run; python -m model.train --resume run --steps 400

The task is recall. A sequence names pairs of a letter and a digit, then says nothing for a while, then asks: after a
letter comes its digit again. `reach` is how far windows carry a token, layer upon layer; the silence is longer. So the
digit can only come from a compressed entry, and a model without entries can do no better than chance, 1 in 10.

Gradients pass straight through the rounding of what is cached. Selection is a choice and has none, so in training every
entry is attended to, and the indexer learns by a second loss to foretell which matter; in use the `index_topk` best are
taken (`model.differentiable`). Router biases have no gradient either: each step moves them towards even load (V4.1
architecture 7.4). Everything is float32. A batch depends on the seed and its step alone, so a resumed run is the run
that was not interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import V41Config, load_config
from flashsim.reading import shorten
from model.differentiable import Selection
from model.loading import load, random_model
from model.moe import Gate
from model.safetensors_file import CheckpointError, SafetensorsFile
from model.saving import check_place, save
from model.tokenizer import byte_tokenizer, encode
from model.transformer import Transformer

IGNORED = -100
"""The target of a position where nothing is asked."""

STATE_FILE = "training.safetensors"
"""Beside the weights of a run: the moments of AdamW, the settings and the record."""


HEADER = "flashsim.training"  # metadata of that file
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter that has had a gradient


class TrainingError(ValueError):
    """A setting of training, or a run to resume, that does not fit: names it and what is accepted."""


def recall_config(*, entries: bool = True, **changes: Any) -> V41Config:
    """The config that is trained: V4.1 with four layers, one of each role, from the preset `tiny`.

    Args:
        entries: False turns every layer into one that has its window alone.
        changes: fields to give other values.

    Raises:
        ConfigError: a change that does not fit.
    """
    ratios, sources, selects = ((0, 2, 1, 1), (1, 2), (1, 2)) if entries else ((0,) * 4, (), ())
    small = {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "n_routed_experts": 4,
        "sliding_window": 4,
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": selects,
        "candidate_source_layer_id": -1,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 6,
        "engram_layer_ids": (),
        "engram_num_embeddings": (),
        "num_nextn_predict_layers": 0,
    }
    return load_config(load_config("tiny").to_dict() | small | changes)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise TrainingError(f"{name} is {value!r}; accepted: a whole number from {low} to {high}")


def reach(config: V41Config) -> int:
    """How many tokens back windows alone can carry something: a window less one for each layer, and an n-gram."""
    grams = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
    return config.num_hidden_layers * (config.sliding_window - 1) + grams


@dataclass(frozen=True)
class Recall:
    """The task: `pairs` of letter and digit, `gap` dots, then every letter again with its digit, in another order.

    One character is one token of the byte tokenizer. Letters of a sequence are distinct, digits are not.
    """

    pairs: int = 8
    gap: int = 16
    LETTERS = "abcdefghijklmnop"
    DIGITS = "0123456789"

    def __post_init__(self):
        _whole("pairs", self.pairs, 1, len(self.LETTERS))
        _whole("gap", self.gap, 0, 10**6)

    @property
    def chance(self) -> float:
        """The share of right answers of a model that guesses."""
        return 1 / len(self.DIGITS)

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return 4 * self.pairs + self.gap

    def batch(self, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """(ids, targets), both [size, tokens]; targets are the digits asked for, at the letters that ask, else -100."""
        _whole("size", size, 1, 2**31)
        generator = torch.Generator().manual_seed(seed)
        letters, digits, dot = (
            torch.tensor(encode(byte_tokenizer(2**9), text)) for text in (self.LETTERS, self.DIGITS, ".")
        )
        order = torch.rand(size, len(letters), generator=generator).argsort(dim=1)[:, : self.pairs]
        asked = torch.rand(size, self.pairs, generator=generator).argsort(dim=1)
        key = letters[order]
        value = digits[torch.randint(len(digits), (size, self.pairs), generator=generator)]
        told = torch.stack((key, value), dim=2).flatten(1)
        answers = value.gather(1, asked)
        questions = torch.stack((key.gather(1, asked), answers), dim=2).flatten(1)
        ids = torch.cat((told, dot.expand(size, self.gap), questions), dim=1)
        targets = torch.full_like(ids, IGNORED)
        targets[:, -2 * self.pairs :: 2] = answers
        return ids, targets


@dataclass(frozen=True)
class Settings:
    """How a run learns. `learning_rate` rises over `warmup` steps and stays; weight decay is for matrices alone.

    `index_weight` is that of the indexer's loss beside the loss of the answers.

    Raises:
        TrainingError: names the field, its value and what is accepted.
    """

    batch_size: int = 24
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.01
    index_weight: float = 0.1
    clip: float = 1.0
    bias_speed: float = 0.001
    seed: int = 0

    def __post_init__(self):
        for name, low, high in (("batch_size", 1, 2**31), ("warmup", 0, 2**31), ("seed", 0, 2**31 - 1)):
            _whole(name, getattr(self, name), low, high)
        for name in ("learning_rate", "weight_decay", "index_weight", "clip", "bias_speed"):
            value = getattr(self, name)
            good = type(value) in (int, float) and math.isfinite(value) and value >= 0
            if not good or (name == "clip" and not value):
                raise TrainingError(
                    f"{name} is {value!r}; accepted: a number {'above' if name == 'clip' else 'from'} 0"
                )


class Row(NamedTuple):
    """One step: its number from 1, the mean loss of the answers in nats, the share of them that was right, in training,
    and the indexer's loss in nats, summed over layers.
    """

    step: int
    loss: float
    recall: float
    index_loss: float


def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """(loss, recall) of logits [B, S, vocab]: cross-entropy, and share of right answers, of the targets."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    asked = targets != IGNORED
    return loss, (logits[asked].argmax(dim=-1) == targets[asked]).float().mean().item()


class Trainer:
    """A model in training, its optimizer and what has happened: `model`, `task`, `settings`, `record` of rows.

    Raises:
        TrainingError: a model that is not of V4.1, float32, with the reference backend, or too short for the task.
    """

    def __init__(self, model: Transformer, task: Recall | None = None, settings: Settings | None = None):
        self.model, self.task, self.settings = model, task or Recall(), settings or Settings()
        self.record: list[Row] = []
        config = model.config
        if not isinstance(config, V41Config) or model.dtype != torch.float32 or model.backend.name != "reference":
            raise TrainingError(f"model is {model.extra_repr()}; accepted: a V4.1 model, reference, float32")
        if self.task.tokens > config.max_position_embeddings:
            most = f"up to max_position_embeddings, {config.max_position_embeddings:,}"
            raise TrainingError(f"a sequence has {self.task.tokens:,} tokens; accepted: {most}")
        self._load: dict[Gate, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Gate):
                module.register_forward_hook(self._count)
        self._backend, self._selection = model.backend, Selection()
        self._ops = [module for module in model.modules() if hasattr(module, "backend")]
        self._trained = {n: p for n, p in model.named_parameters() if ".gate.bias" not in n}  # no gradient reaches it
        matrices = [p for p in self._trained.values() if p.ndim > 1]
        others = [p for p in self._trained.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95), foreach=True)

    @classmethod
    def new(cls, config: Any = None, task: Recall | None = None, settings: Settings | None = None) -> Trainer:
        """A run from random weights, those of the settings' seed; of `recall_config()` where no config is given."""
        settings = settings or Settings()
        config = recall_config() if config is None else config
        return cls(random_model(config, seed=settings.seed), task, settings)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> Row:
        """One batch: forward, backward, AdamW, router biases."""
        settings, number = self.settings, len(self.record) + 1
        ids, targets = self.task.batch(settings.batch_size, settings.seed * 2**32 + number)
        self._learning(True)
        try:
            loss, recall = score(self.model(ids), targets)
            index_loss = torch.as_tensor(self._selection.loss)
            (loss + settings.index_weight * index_loss).backward()
        finally:
            self._learning(False)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(number / max(settings.warmup, 1), 1)
        nn.utils.clip_grad_norm_(self._trained.values(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for gate, tokens in self._load.items():
            gate.bias += settings.bias_speed * (tokens.mean() - tokens).sign()
        self.record.append(Row(number, loss.item(), recall, index_loss.item()))
        return self.record[-1]

    def run(self, steps: int, show: Callable[[Row], None] | None = None) -> list[Row]:
        """Train until `steps` steps have been made in all; `show` is called with each row. Returns the record."""
        _whole("steps", steps, 0, 2**31)
        while len(self.record) < steps:
            row = self.step()
            if show is not None:
                show(row)
        return self.record

    def evaluate(self, size: int = 256, seed: int = 2**62) -> tuple[float, float]:
        """(loss, recall) of the model as it is used, packed and selecting, on sequences that no step has seen."""
        ids, targets = self.task.batch(size, seed)
        loss, recall = score(self.model(ids), targets)
        return loss.item(), recall

    def _learning(self, on: bool) -> None:
        self.model.train(on)
        self._selection.begin()
        for module in self._ops:
            module.backend = self._selection if on else self._backend
        for parameter in self._trained.values():
            parameter.requires_grad_(on)

    def _count(self, gate: Gate, inputs, picked) -> None:
        self._load[gate] = torch.bincount(picked[0].flatten(), minlength=len(gate.bias)).float()

    # --- keeping a run -----------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write the run: the weights as a checkpoint that `model.load` reads, and beside them what it takes to resume.

        Raises:
            CheckpointError: the folder has something in it, or cannot be written.
        """
        tensors = {}
        for name, parameter in self._trained.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        about = {"task": asdict(self.task), "settings": asdict(self.settings), "record": self.record}
        about["tensors"] = len(tensors)
        state = to_bytes(tensors, {HEADER: json.dumps(about)})
        return save(self.model, folder, extra_files={STATE_FILE: state})

    @classmethod
    def resume(cls, folder: str | Path) -> Trainer:
        """The run that `save` wrote, to go on as if it had not stopped.

        Raises:
            CheckpointError: the folder is not that of a run, or damaged.
        """
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"{Path(folder).name} has no {STATE_FILE}; accepted: a folder that training wrote")
        file = SafetensorsFile(path)
        try:
            about = json.loads(file.metadata[HEADER])
            given = {"task": Recall(**about["task"]), "settings": Settings(**about["settings"])}
            for name, value in given.items():
                if asdict(value) != about[name]:
                    raise ValueError(f"not every field of {name} is there")
            record = [_row(i, row) for i, row in enumerate(about["record"], 1)]
            if about["tensors"] != len(file.headers):
                raise ValueError(f"{len(file.headers)} tensors, {about['tensors']} were written")
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(f"{STATE_FILE} is not that of a run ({shorten(error)})") from None
        run = cls(load(Path(folder)), **given)
        run.record = record
        for name in file.headers:
            parameter, _, key = name.rpartition("/")
            if parameter not in run._trained or key not in MOMENTS:
                raise CheckpointError(f"{STATE_FILE} has {name}, and the model has no such parameter in training")
            like, value = run._trained[parameter], file.tensor(name)
            shape = () if key == "step" else tuple(like.shape)
            if value.dtype != torch.float32 or tuple(value.shape) != shape:
                found = f"{value.dtype} {tuple(value.shape)}"
                raise CheckpointError(f"{STATE_FILE} has {name} as {found}; accepted: torch.float32 {shape}")
            if key == "step" and not 1 <= value.item() <= len(record):
                raise CheckpointError(f"{STATE_FILE} has {name} {value.item():g}; accepted: 1 to {len(record)}")
            run.optimizer.state[like][key] = value.clone()
        for parameter, state in run.optimizer.state.items():
            if len(state) != len(MOMENTS):
                name = next(name for name, p in run._trained.items() if p is parameter)
                raise CheckpointError(f"{STATE_FILE} has {', '.join(state)} of {name}; accepted: {', '.join(MOMENTS)}")
        return run


def _row(number: int, values: Any) -> Row:
    row = Row(*values)
    if row.step != number or any(type(value) not in (int, float) for value in row):
        raise ValueError(f"row {number} of the record is {values}")
    return row


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (CheckpointError, MemoryError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model.train", description="Trains a small V4.1 model to recall what lies outside its windows."
    )
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="steps in all (150)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="show each so many steps (10)")
    parser.add_argument("--out", metavar="DIR", help="write the run into this new folder at the end")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder, as it was begun")
    start = parser.add_argument_group("a new run")
    start.add_argument("--seed", type=int, metavar="S", help="of weights and batches (0)")
    start.add_argument("--pairs", type=int, metavar="N", help=f"letters to remember ({Recall().pairs})")
    start.add_argument("--gap", type=int, metavar="N", help=f"tokens between telling and asking ({Recall().gap})")
    start.add_argument("--window-only", action="store_true", default=None, help="no compressed entries")
    return parser


def _run(options: argparse.Namespace) -> int:
    new = {name: getattr(options, name) for name in ("seed", "pairs", "gap", "window_only")}
    new = {name: value for name, value in new.items() if value is not None}
    for name, low in (("steps", 0), ("every", 1)):
        if getattr(options, name) < low:
            raise TrainingError(f"--{name} is {getattr(options, name)}; accepted: a whole number from {low}")
    if options.resume is not None:
        if new:
            first = next(iter(new)).replace("_", "-")
            raise TrainingError(f"--{first} is given with --resume; accepted: --steps, --every and --out")
        run = Trainer.resume(options.resume)
    else:
        task = Recall(**{name: new[name] for name in ("pairs", "gap") if name in new})
        config = recall_config(entries="window_only" not in new)
        run = Trainer.new(config, task, Settings(seed=new.get("seed", 0)))
    if options.out is not None:
        check_place(options.out)
    count, task = sum(p.numel() for p in run.model.parameters()), run.task
    print(
        f"{count:,} parameters; {task.tokens} tokens a sequence, {task.gap} of them silence; windows reach back "
        f"{reach(run.model.config)}; chance is {task.chance:.0%}"
    )
    run.run(
        options.steps,
        lambda row: (
            row.step % options.every == 0
            and print(f"step {row.step:5}   loss {row.loss:6.3f}   recall {row.recall:4.0%}", flush=True)
        ),
    )
    loss, recall = run.evaluate()
    print(f"in use, on sequences never seen: loss {loss:.3f}, recall {recall:.1%}")
    if options.out is not None:
        print(f"written: {run.save(options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
