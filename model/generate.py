"""Text from a model: prefill, then one token after another, each shown when it is chosen.

    python -m model.generate --random mini --prompt "Hello"
    python -m model.generate --checkpoint DIR --chat --prompt "What is 2+2?" --temperature 1 --top-p 0.95 --seed 0

Temperature 0 is greedy: the largest logit, the lowest id among equals. Otherwise the softmax of logits / temperature is
cut to its `top_p` nucleus, the fewest tokens whose probabilities reach it, and sampled with a generator of its own, so
a seed gives the same text whatever else ran. The report says what the prompt cost: rows that went through the decoder
half and rows that a prefix hit replayed (V4.1 architecture, 13), tokens a second, and the cache's bytes by component.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashsim.persistent import REPLAY_MODES
from flashsim.reading import ConfigError
from flashsim.units import number_of_bytes
from model.backend import BackendError
from model.cache import Cache, CacheError
from model.chat import EFFORTS, ChatError, render
from model.loading import load
from model.replay import ReplayError
from model.safetensors_file import CheckpointError
from model.tokenizer import TextStream, TokenizerError, check_ids, encode
from model.transformer import EXACT, InputError, Transformer

EOS_ID = 1
"""The end token where no config.json names another."""

CHUNK = 512
"""Prompt tokens that run at a time, so that progress is seen and memory stays small."""

SMALL_BYTES = 10**9
"""A model of fewer bytes runs on one CPU thread: its operations are too short to share."""


class GenerateError(ValueError):
    """A setting of generation that does not exist: names it, its value and what is accepted."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. `temperature` 0 is greedy; `top_p` 1 cuts nothing; `seed` None is a new one each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        _finite("temperature", self.temperature, 0, math.inf, "a finite number of at least 0")
        _finite("top_p", self.top_p, 0, 1, "a number above 0, at most 1")
        if self.top_p == 0:
            raise GenerateError(f"top_p is {self.top_p!r}; accepted: a number above 0, at most 1")
        whole = self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**63)
        if not whole:
            raise GenerateError(f"seed is {self.seed!r}; accepted: a whole number from 0")

    def generator(self) -> torch.Generator:
        """A generator for one text."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocab].

    Raises:
        GenerateError: a logit is NaN or infinite.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if not torch.isfinite(logits).all():
        raise GenerateError("the logits are not finite; the weights or the cache are damaged")
    if sampling.temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    probabilities, ids = nucleus(logits, sampling)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def nucleus(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, ids) that are left of logits [vocab], float64: the fewest likeliest tokens that reach `top_p`.

    Probabilities add up to 1. Among equals the lower id comes first.
    """
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities, ids = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities
    kept = before < sampling.top_p
    kept[0] = True
    probabilities = probabilities[kept]
    return probabilities / probabilities.sum(), ids[kept]


@dataclass
class Statistics:
    """What a generation did and took. Times in seconds; the cache's bytes when it stopped.

    `prompt_tokens` of which `prefix_tokens` were in a stored prefix; `replayed_rows` of those ran again, and
    `decoder_rows` rows of the prompt went through the decoder half.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_tokens: int = 0
    replayed_rows: int = 0
    decoder_rows: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: dict[str, int] = field(default_factory=dict)
    stopped_by: str = ""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second that were not in the stored prefix, or None where nothing was timed."""
        return (self.prompt_tokens - self.prefix_tokens) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens a second after the first, which the prefill gives; None before the second."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s and self.new_tokens > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        speeds = {name: getattr(self, name) for name in ("prefill_tokens_per_s", "decode_tokens_per_s")}
        return vars(self) | speeds

    def __str__(self) -> str:
        def speed(value: float | None) -> str:
            return "too few to time" if value is None else f"{value:,.1f} tokens/s"

        lines = [
            f"prompt   {self.prompt_tokens:,} tokens in {self.prefill_s:.3f} s, {speed(self.prefill_tokens_per_s)}",
            f"new      {self.new_tokens:,} tokens in {self.decode_s:.3f} s, {speed(self.decode_tokens_per_s)}; "
            f"stopped by {self.stopped_by}",
            f"rows     {self.decoder_rows:,} of {self.prompt_tokens:,} prompt rows in the decoder half; "
            f"{self.replayed_rows:,} of {self.prefix_tokens:,} stored prefix rows replayed",
            "cache    " + number_of_bytes(sum(self.cache_bytes.values())),
        ]
        return "\n".join(lines + [f"  {name:24}{size:>14,} bytes" for name, size in self.cache_bytes.items()])


class Generation:
    """New token ids, one at a time; iterate once. `statistics` and `cache` fill as it goes.

    Args:
        model: a `Transformer`.
        ids: the prompt's token ids.
        max_new_tokens: at most so many.
        sampling: how tokens are chosen; greedy by default.
        stop_ids: ids that end the text; they are yielded too.
        tail, chunk: as of `Transformer.prefill`.
        stored: global cache of a prefix of the prompt (`cache.prefix(P)`), to replay from.
        replay: `cold`, `exact` or `bounded`, how (see `model.replay`).
        progress: called with (prompt tokens done, in all) while the prompt runs.

    Raises:
        TokenizerError, InputError, GenerateError: an empty prompt, an id outside the vocabulary, more tokens than the
            model has positions for, a setting that does not exist.
    """

    def __init__(
        self,
        model: Transformer,
        ids: Sequence[int],
        max_new_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        tail: int | str | None = EXACT,
        chunk: int | None = CHUNK,
        stored: Cache | None = None,
        replay: str = "exact",
        progress: Callable[[int, int], None] | None = None,
    ):
        self.model, self.ids = model, check_ids(ids, model.config.vocab_size)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise GenerateError(f"max_new_tokens is {max_new_tokens!r}; accepted: a whole number from 1")
        total, limit = len(self.ids) + max_new_tokens - 1, model.config.max_position_embeddings
        if total > limit:
            raise InputError(
                f"{len(self.ids):,} prompt tokens and {max_new_tokens:,} new ones need {total:,} positions; "
                f"accepted: max_position_embeddings, {limit:,}"
            )
        self.max_new_tokens, self.sampling = max_new_tokens, sampling or Sampling()
        self.stop_ids = frozenset(stop_ids)
        self.options = {"tail": tail, "chunk": chunk, "stored": stored, "replay": replay, "progress": progress}
        self.cache: Cache | None = None
        self.statistics = Statistics(prompt_tokens=len(self.ids))

    def __iter__(self) -> Iterator[int]:
        statistics, generator = self.statistics, self.sampling.generator()
        started = time.perf_counter()
        logits = self._prefill()
        statistics.prefill_s = time.perf_counter() - started
        started = time.perf_counter()
        while True:
            token = sample(logits[0], self.sampling, generator)
            statistics.new_tokens += 1
            statistics.decode_s = time.perf_counter() - started
            if token in self.stop_ids:
                statistics.stopped_by = f"token {token}"
            elif statistics.new_tokens == self.max_new_tokens:
                statistics.stopped_by = "max_new_tokens"
            if statistics.stopped_by:
                statistics.cache_bytes = self.cache.nbytes("component")
            yield token
            if statistics.stopped_by:
                return
            logits = self.model(torch.tensor([[token]], device=self.model.device), cache=self.cache, last=True)

    def _prefill(self) -> torch.Tensor:
        prompt, options = torch.tensor([self.ids], device=self.model.device), self.options
        if options["stored"] is not None:
            run = self.model.replay(prompt, options["stored"], options["replay"], chunk=options["chunk"])
            self.cache = run.cache
            self.statistics.prefix_tokens = run.prefix_tokens
            self.statistics.replayed_rows, self.statistics.decoder_rows = run.encoder_rows, run.decoder_rows
            return run.logits
        self.cache = self.model.new_cache(capacity=len(self.ids) + self.max_new_tokens)
        tail = options["tail"]
        logits = self.model.prefill(prompt, self.cache, tail=tail, chunk=options["chunk"], progress=options["progress"])
        rows = self.model.tail_rows(self.cache.rollback) if tail == EXACT else tail
        self.statistics.decoder_rows = len(self.ids) if rows is None else min(rows, len(self.ids))
        return logits


def generate(model: Transformer, ids: Sequence[int], max_new_tokens: int = 128, **options: Any) -> list[int]:
    """The new token ids as a list; options as of `Generation`."""
    return list(Generation(model, ids, max_new_tokens, **options))


def stop_ids(config_json: dict[str, Any] | None) -> tuple[int, ...]:
    """The end tokens that a config.json names."""
    value = (config_json or {}).get("eos_token_id", EOS_ID)
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else (EOS_ID,)


def _finite(name: str, value: Any, low: float, high: float, accepted: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise GenerateError(f"{name} is {value!r}; accepted: {accepted}")


# --- command line -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (
        BackendError,
        CacheError,
        ChatError,
        CheckpointError,
        ConfigError,
        GenerateError,
        InputError,
        MemoryError,
        ReplayError,
        TokenizerError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description="Text from a V4.1 model.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", metavar="DIR", help="a folder with config.json and safetensors")
    which.add_argument("--random", metavar="PRESET", help="tiny, mini or a config.json, with random weights")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="the prompt's text; - reads it from standard input")
    text.add_argument("--prompt-ids", metavar="IDS", help="the prompt's token ids, 1,2,3")
    chat = parser.add_argument_group("chat format")
    chat.add_argument("--chat", action="store_true", help="put the prompt into the chat format")
    chat.add_argument("--system", metavar="TEXT", help="a system message; implies --chat")
    chat.add_argument("--thinking", action="store_true", help="let the model think first; implies --chat")
    chat.add_argument("--effort", help=f"of thinking: {', '.join(EFFORTS)}, or 1 to 100")
    choice = parser.add_argument_group("choice of tokens")
    choice.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    choice.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    choice.add_argument("--top-p", type=float, default=1.0, metavar="P")
    choice.add_argument("--seed", type=int, help="of sampling, and of random weights")
    choice.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--backend", default="reference")
    how.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    how.add_argument("--device", default="cpu")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1 for models under a GB, as they only wait")
    how.add_argument("--packed", action="store_true", help="keep packed weights packed in memory")
    how.add_argument("--offload", action="store_true", help="leave matrices in the files")
    how.add_argument("--activation-rounding", action="store_true", help="round inputs of packed linears to FP8")
    how.add_argument("--no-cache-rounding", action="store_true", help="leave out the rounding of what is cached")
    how.add_argument("--tail", help="prompt rows in the decoder half: exact (default), all, or a number")
    how.add_argument("--chunk", type=int, default=CHUNK, metavar="N", help="prompt tokens at a time")
    how.add_argument("--prefix", type=int, metavar="P", help="treat the first P prompt tokens as a prefix hit")
    how.add_argument(
        "--replay", choices=REPLAY_MODES, help="how windows are made again after a prefix hit; default exact"
    )
    how.add_argument("--json", action="store_true", help="print one JSON object at the end and no stream")
    return parser


def _run(options: argparse.Namespace) -> int:
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    tail = _tail(EXACT if options.tail is None else options.tail)
    _refuse_idle(options)
    if options.threads is not None and options.threads < 1:
        raise GenerateError(f"threads is {options.threads}; accepted: a whole number from 1")
    source = Path(options.checkpoint) if options.checkpoint is not None else options.random
    model = load(
        source,
        options.backend,
        getattr(torch, options.dtype),
        options.device,
        not options.no_cache_rounding,
        seed=options.seed or 0,
        packed=options.packed,
        offload=options.offload,
        activation_rounding=options.activation_rounding,
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif not options.offload and sum(weight.nbytes for weight in model.parameters()) < SMALL_BYTES:
        torch.set_num_threads(1)
    ids = check_ids(_prompt_ids(options, model.tokenizer), model.config.vocab_size)
    run = Generation(
        model,
        ids,
        options.max_new_tokens,
        sampling=sampling,
        stop_ids=() if options.ignore_eos else stop_ids(model.config_json),
        tail=tail,
        chunk=options.chunk,
        stored=_stored_prefix(model, ids, options),
        replay=options.replay or "exact",
        progress=_progress if sys.stderr.isatty() else None,
    )
    stream = TextStream(model.tokenizer) if model.tokenizer is not None else None
    new: list[int] = []
    pieces: list[str] = []
    for token in run:
        pieces.append(stream.push(token) if stream is not None else f"{token} ")
        new.append(token)
        if not options.json:
            print(pieces[-1], end="", flush=True)
    pieces.append(stream.close() if stream is not None else "")
    if options.json:
        text = "".join(pieces) if stream is not None else None
        result = {"prompt_ids": ids, "ids": new, "text": text, "statistics": run.statistics.to_dict()}
        print(json.dumps(result, ensure_ascii=False, indent=1))
    else:
        print(pieces[-1], end="\n\n")
        print(run.statistics)
    return 0


def _refuse_idle(options: argparse.Namespace) -> None:
    """An option that would change nothing is a mistake, not a wish."""
    for name, idle, accepted in (
        ("effort", not options.thinking and options.effort is not None, "with --thinking"),
        ("top_p", options.temperature == 0 and options.top_p != 1, "with a --temperature above 0, as 0 is greedy"),
        ("replay", options.prefix is None and options.replay is not None, "with --prefix"),
        ("tail", options.prefix is not None and options.tail is not None, "without --prefix, where --replay sets it"),
    ):
        if idle:
            raise GenerateError(f"{name} is {getattr(options, name)!r}; accepted: {accepted}")


def _prompt_ids(options: argparse.Namespace, tokenizer) -> list[int]:
    as_chat = options.chat or options.thinking or options.system is not None
    if options.prompt_ids is not None:
        if as_chat:
            raise GenerateError("prompt-ids is given with chat options; accepted: --prompt with them")
        try:
            return [int(part) for part in options.prompt_ids.replace(",", " ").split()]
        except ValueError:
            raise GenerateError(f"prompt-ids is {options.prompt_ids!r}; accepted: whole numbers and commas") from None
    if tokenizer is None:
        raise TokenizerError("there is no tokenizer for a text prompt; accepted: --prompt-ids")
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if as_chat:
        messages = [{"role": "user", "content": text}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        effort = options.effort
        effort = int(effort) if effort is not None and effort.isdecimal() else effort
        text = render(messages, thinking=options.thinking, effort=effort)
    return encode(tokenizer, text)


def _stored_prefix(model: Transformer, ids: list[int], options: argparse.Namespace) -> Cache | None:
    if options.prefix is None:
        return None
    if not 1 <= options.prefix <= len(ids):
        raise GenerateError(f"prefix is {options.prefix}; accepted: 1 to the prompt's {len(ids)} tokens")
    cache = model.new_cache(capacity=options.prefix)
    model.prefill(torch.tensor([ids[: options.prefix]], device=model.device), cache, chunk=options.chunk)
    return cache.prefix(options.prefix)


def _tail(text: str) -> int | str | None:
    if text in (EXACT, "all"):
        return EXACT if text == EXACT else None
    if not text.isdecimal() or int(text) < 1:
        raise GenerateError(f"tail is {text!r}; accepted: {EXACT}, all, or a whole number from 1")
    return int(text)


def _progress(done: int, total: int) -> None:
    end = "\r" if done < total else "\r\033[K"
    print(f"\rprompt: {done:,} of {total:,} tokens" if done < total else "", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
