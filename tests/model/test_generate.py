"""Generation: choice of tokens, agreement with the full forward, what is refused, and the command."""

import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import model
from flashsim.kv_cache import kv_cache
from model import generate as command
from model.generate import GenerateError, Generation, Sampling, generate, nucleus, sample, stop_ids
from model.tokenizer import TokenizerError
from model.transformer import InputError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
PROMPT = [3, 17, 99, 42, 250, 8, 9, 77, 13, 5, 201, 60, 61, 62, 63, 64, 65, 66, 30, 31, 32]


@pytest.fixture(scope="module")
def tiny():
    return model.load("tiny", seed=11)


# --- choice -----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert {sample(logits, Sampling(), Sampling(seed=s).generator()) for s in range(20)} == {1}


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [
        (1.0, [2, 0, 3, 1]),
        (0.95, [2, 0, 3, 1]),
        (0.89, [2, 0, 3]),
        (0.75, [2, 0]),
        (0.5, [2]),
        (0.51, [2, 0]),
        (1e-9, [2]),
    ],
)
def test_nucleus(top_p, ids):
    """Probabilities 0.5, 0.25, 0.15, 0.1: a token is kept while those before it have not reached top_p."""
    logits = torch.tensor([0.25, 0.1, 0.5, 0.15], dtype=torch.float64).log()
    probabilities, kept = nucleus(logits, Sampling(1.0, top_p))
    assert kept.tolist() == ids
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)


def test_nucleus_prefers_the_lower_id_among_equals():
    _, kept = nucleus(torch.zeros(4, dtype=torch.float64), Sampling(1.0, 0.5))
    assert kept.tolist() == [0, 1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8)])
def test_sampled_frequencies(temperature, top_p):
    """Counts of 4,000 draws lie within 5 standard deviations of what the formula gives."""
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    weights = torch.softmax(logits.double() / temperature, 0)
    order = weights.argsort(descending=True)
    kept, total = [], 0.0
    for i in order.tolist():
        kept.append(i)
        total += float(weights[i])
        if total >= top_p:
            break
    sampling = Sampling(temperature, top_p, seed=5)
    generator = sampling.generator()
    draws = 4_000
    counts = Counter(sample(logits, sampling, generator) for _ in range(draws))
    assert set(counts) <= set(kept)
    for i in kept:
        p = float(weights[i]) / total
        assert abs(counts[i] - draws * p) < 5 * (draws * p * (1 - p)) ** 0.5 + 1


def test_large_logits_and_small_temperatures():
    logits = torch.tensor([1e4, 1e4 - 1, -1e4])
    assert sample(logits, Sampling(1e-3, seed=0), Sampling(seed=0).generator()) == 0
    assert sample(logits.bfloat16(), Sampling(1.0, seed=0), Sampling(seed=0).generator()) in (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(bad):
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(GenerateError, match="logits are not finite"):
            sample(torch.tensor([0.0, bad]), sampling, sampling.generator())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": 2**63},
    ],
)
def test_settings_that_do_not_exist(settings):
    with pytest.raises(GenerateError, match=f"{next(iter(settings))} is .*; accepted: "):
        Sampling(**settings)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_greedy_equals_full_forwards(tiny):
    """Token after token through the cache, and each time from the beginning: the same text."""
    ids = list(PROMPT)
    for token in generate(tiny, PROMPT, 12):
        assert token == int(tiny(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
def test_chunks_of_the_prompt_change_nothing(tiny, chunk):
    assert generate(tiny, PROMPT, 6, chunk=chunk) == generate(tiny, PROMPT, 6)


def test_a_seed_is_a_text(tiny):
    def text(seed):
        return generate(tiny, PROMPT, 8, sampling=Sampling(1.0, 0.95, seed))

    first = text(1)
    torch.manual_seed(99)
    torch.rand(7)
    assert text(1) == first and len({tuple(text(seed)) for seed in range(6)}) > 1
    state = torch.get_rng_state()
    text(2)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is left alone
    assert len({tuple(text(None)) for _ in range(4)}) > 1


def test_stopping(tiny):
    tokens = generate(tiny, PROMPT, 10)
    stop = tokens[3]
    run = Generation(tiny, PROMPT, 10, stop_ids=[stop])
    assert list(run) == tokens[: tokens.index(stop) + 1]
    assert run.statistics.stopped_by == f"token {stop}"
    run = Generation(tiny, PROMPT, 2)
    assert list(run) == tokens[:2] and run.statistics.stopped_by == "max_new_tokens"


def test_stop_ids():
    assert stop_ids(None) == (1,) and stop_ids({}) == (1,)
    assert stop_ids({"eos_token_id": 7}) == (7,) and stop_ids({"eos_token_id": [7, 8]}) == (7, 8)
    assert stop_ids({"eos_token_id": None}) == (1,)


def test_tokens_come_one_by_one(tiny):
    run = iter(Generation(tiny, PROMPT, 1000))
    assert [next(run), next(run)] == generate(tiny, PROMPT, 2)


def test_statistics(tiny):
    run = Generation(tiny, PROMPT, 5)
    list(run)
    s = run.statistics
    context = len(PROMPT) + 5 - 1  # the last token was not run
    assert (s.prompt_tokens, s.new_tokens, s.prefix_tokens, s.replayed_rows) == (len(PROMPT), 5, 0, 0)
    assert s.cache_bytes == run.cache.nbytes("component")
    assert sum(s.cache_bytes.values()) == kv_cache(tiny.config, context).total()
    assert s.prefill_s > 0 and s.decode_tokens_per_s == pytest.approx(4 / s.decode_s)
    assert s.prefill_tokens_per_s == pytest.approx(len(PROMPT) / s.prefill_s)
    assert s.decoder_rows == min(tiny.tail_rows(), len(PROMPT))
    assert json.loads(json.dumps(s.to_dict()))["decode_tokens_per_s"] == s.decode_tokens_per_s
    one = Generation(tiny, PROMPT, 1)
    list(one)
    assert one.statistics.decode_tokens_per_s is None and "too few to time" in str(one.statistics)


@pytest.mark.parametrize(("tail", "rows"), [(1, 1), (8, 8), (10**6, len(PROMPT)), (None, len(PROMPT))])
def test_rows_of_the_tail(tiny, tail, rows):
    run = Generation(tiny, PROMPT, 1, tail=tail)
    list(run)
    assert run.statistics.decoder_rows == rows


@pytest.mark.parametrize("mode", ["cold", "exact", "bounded"])
def test_a_prefix_hit(tiny, mode):
    prompt = [i * 31 % 256 for i in range(150)]
    cache = tiny.new_cache()
    tiny.prefill(torch.tensor([prompt[:120]]), cache)
    run = Generation(tiny, prompt, 4, stored=cache.prefix(120), replay=mode)
    tokens = list(run)
    assert run.statistics.prefix_tokens == 120
    assert (run.statistics.replayed_rows == 120) == (mode == "cold")
    if mode == "bounded":
        assert run.statistics.replayed_rows == tiny.config.sliding_window
    else:
        assert tokens == generate(tiny, prompt, 4)


def test_progress(tiny):
    seen = []
    generate(tiny, PROMPT, 1, chunk=8, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 21), (16, 21), (21, 21)]


def test_prompts_that_are_refused(tiny):
    for ids, pattern in (
        ([], "prompt is empty"),
        ([320], "token 0 of the prompt is 320"),
        ([5, -1], "token 1 .* is -1"),
    ):
        with pytest.raises(TokenizerError, match=pattern):
            Generation(tiny, ids)
    with pytest.raises(GenerateError, match="max_new_tokens is 0"):
        Generation(tiny, [1], 0)
    with pytest.raises(InputError, match=r"2 prompt tokens and 4,096 new ones need 4,097 positions; .* 4,096"):
        Generation(tiny, [1, 2], 4096)
    Generation(tiny, [1, 2], 4095)


# --- the command ------------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    status = command.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command_with_random_weights(capsys):
    status, out, err = run(capsys, "--random", "tiny", "--prompt", "Hello", "--max-new-tokens", 6, "--seed", 2)
    assert status == 0 and err == ""
    assert "tokens/s" in out and "window_kv" in out and "prompt rows in the decoder half" in out
    assert "stored prefix rows replayed" in out


def test_command_with_a_checkpoint(capsys):
    arguments = ("--checkpoint", GOLDEN / "aq", "--prompt", "abc", "--max-new-tokens", 9, "--json")
    status, out, _ = run(capsys, *arguments)
    printed = json.loads(out)
    lm = model.load(GOLDEN / "aq")
    ids = generate(lm, printed["prompt_ids"], 9, stop_ids=stop_ids(lm.config_json))
    assert status == 0 and printed["ids"] == ids
    assert printed["text"] == lm.tokenizer.decode(ids, skip_special_tokens=False)
    for option in ("--packed", "--offload"):
        assert json.loads(run(capsys, *arguments, option)[1])["ids"] == ids


def test_command_with_a_prefix(capsys):
    arguments = ("--random", "tiny", "--prompt", "x" * 60, "--max-new-tokens", 2, "--json")
    plain = json.loads(run(capsys, *arguments)[1])
    hit = json.loads(run(capsys, *arguments, "--prefix", 40, "--replay", "exact")[1])
    assert hit["ids"] == plain["ids"] and hit["statistics"]["prefix_tokens"] == 40
    bounded = json.loads(run(capsys, *arguments, "--prefix", 40, "--replay", "bounded")[1])
    assert bounded["statistics"]["replayed_rows"] == 8


def test_command_with_the_chat_format(capsys):
    arguments = ("--random", "tiny", "--prompt", "2+2", "--max-new-tokens", 1, "--json")
    tokenizer = model.load("tiny", device="meta").tokenizer

    def prompt(*more):
        printed = json.loads(run(capsys, *arguments, *more)[1])
        return tokenizer.decode(printed["prompt_ids"], skip_special_tokens=False)

    assert prompt("--chat") == "<｜begin▁of▁sentence｜><｜User｜>2+2<｜Assistant｜></think>"
    assert prompt("--system", "S").startswith("<｜begin▁of▁sentence｜><｜System｜>S<｜User｜>2+2")
    thinking = prompt("--thinking", "--effort", "7")
    assert "Reasoning Effort: 7 (range" in thinking and thinking.endswith("<think>")


def test_command_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    _, out, _ = run(capsys, "--random", "tiny", "--prompt", "-", "--max-new-tokens", 1, "--json")
    assert json.loads(out)["prompt_ids"] == model.load("tiny", device="meta").tokenizer.encode("Hi").ids


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--random", "tiny", "--prompt", ""], "the prompt is empty"),
        (["--random", "tiny", "--prompt-ids", "1,x"], "prompt-ids is '1,x'"),
        (["--random", "tiny", "--prompt-ids", "320"], "token 0 of the prompt is 320"),
        (["--random", "tiny", "--prompt-ids", "1", "--chat"], "prompt-ids is given with chat"),
        (["--random", "tinny", "--prompt", "x"], "did you mean tiny"),
        (["--random", "v4.1-flash", "--prompt", "x"], "with its weights needs 2,993,978,739,136 bytes"),
        (["--random", "tiny", "--prompt", "x", "--offload"], "random weights"),
        (["--checkpoint", "tiny", "--prompt", "x"], "is not a folder"),
        (["--checkpoint", str(GOLDEN / "c32"), "--prompt", "x"], "there is no tokenizer"),
        (["--checkpoint", str(GOLDEN / "v4"), "--prompt", "x"], "there is no tokenizer for a text prompt"),
        (["--random", "tiny", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--random", "tiny", "--prompt", "x", "--top-p", "0"], "top_p is 0"),
        (["--random", "tiny", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--random", "tiny", "--prompt", "x", "--max-new-tokens", "4097"], "need 4,097 positions"),
        (["--random", "tiny", "--prompt", "x", "--tail", "some"], "tail is 'some'; accepted: exact, all"),
        (["--random", "tiny", "--prompt", "x", "--prefix", "2"], "prefix is 2"),
        (["--random", "tiny", "--prompt", "x", "--threads", "0"], "threads is 0"),
        (["--random", "tiny", "--prompt", "x", "--chunk", "0"], "chunk is 0"),
        (["--random", "tiny", "--prompt", "x", "--backend", "cuda"], "backend is 'cuda'"),
        (["--random", "tiny", "--prompt", "x", "--thinking", "--effort", "101"], "effort is 101"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(capsys, arguments, pattern):
    status, out, err = run(capsys, *arguments)
    assert status == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and pattern in err


def test_command_runs_as_a_module():
    process = subprocess.run(
        [sys.executable, "-m", "model.generate", "--random", "tiny", "--prompt", "Hi", "--max-new-tokens", "2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "tokens/s" in process.stdout and process.stderr == ""
