"""The cache between requests: what is kept on SSD per turn, in the window pool, and what has to be replayed.

Two regimes (V4.1 report 3.2). V4 keeps the global KV of every stored prefix whole, and the windows of all layers as
snapshots at two places of a request, the end of the input and the end of the output. V4.1 keeps global KV alone; the
encoder's windows live for minutes in a pool in host memory, the decoder's are never cached, and a hit without a window
replays a bounded number of tokens. Earlier generations have no window: their whole cache is global.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flashsim.config import CompressedConfig, Config, V4Config, V41Config, load_config
from flashsim.formats import Layout
from flashsim.formula import Number
from flashsim.kv_cache import kv_cache, window_record
from flashsim.report import Part, Report, Row, build
from flashsim.schedule import last_kv_source, layer_plan

SNAPSHOTS_PER_REQUEST = 2
"""Window snapshots of one V4 request: the end of its input, the end of its output (V4.1 report 3.2.1)."""

_SOURCE = "V4.1 report (arXiv 2609.19969), 3.2.1"


def persistent_cache(
    config: Config, new_tokens: Any, *, layout: Layout | str | Mapping | None = None, snapshots: int | None = None
) -> Report:
    """Bytes one turn of N new tokens, input and output together, adds to the persistent cache.

        global:  bytes_per_record / tokens_per_record * N
        window:  snapshots * sliding_window * bytes_per_record in every layer (V4 alone)

    Args:
        new_tokens: N, one number or several.
        snapshots: window snapshots a request; default 2 for V4, 0 for every other family.

    Raises:
        ContextError, LayoutError, ValueError: naming the value and what is accepted.

    >>> from flashsim.config import load_config
    >>> persistent_cache(load_config("v4-flash"), 1829).by("tier")["window"]
    6428672
    """
    config = load_config(config)
    if snapshots is None:
        snapshots = SNAPSHOTS_PER_REQUEST if isinstance(config, V4Config) else 0
    if isinstance(snapshots, bool) or not isinstance(snapshots, int) or snapshots < 0:
        raise ValueError(f"snapshots is {snapshots!r}; accepted: a whole number from 0")
    by_layer: dict[int, list[Row]] = {}
    for row in kv_cache(config, 1, layout=layout).rows:
        by_layer.setdefault(row.layer, []).append(row)

    def parts(plan) -> list[Part]:
        result = []
        for row in by_layer.get(plan.layer, ()):
            names = {"record_bytes": row.bytes_per_record, "tokens_per_record": row.tokens_per_record}
            if row.tier == "global":
                formula = "record_bytes * N / tokens_per_record"
                result.append(Part(row.component, formula, row.precision, "global", _SOURCE, names=names))
            elif row.tier == "window" and snapshots:
                formula = "snapshots * sliding_window * record_bytes"
                result.append(Part("window_snapshot", formula, row.precision, "window", _SOURCE, names=names))
        return result

    return build(
        config,
        new_tokens,
        parts,
        title=f"{config.name}: bytes a turn of N new tokens adds to the persistent cache",
        unit="bytes",
        names={"snapshots": snapshots},
    )


def window_snapshot_bytes(
    config: CompressedConfig, *, half: str | None = None, layout: Layout | str | Mapping | None = None
) -> int:
    """Bytes of one snapshot of full windows, of all layers or of the `encoder` or `decoder` half.

    V4.1 pools the encoder half alone: 1,351,680 bytes a sequence.

    Raises:
        ValueError: a half that is neither.

    >>> from flashsim.config import load_config
    >>> window_snapshot_bytes(load_config("v4.1-flash"), half="encoder")
    1351680
    """
    if not isinstance(config, CompressedConfig):
        raise ValueError(
            f"model_type is {config.model_type!r}; accepted: deepseek_v4, deepseek_v41, which have windows"
        )
    if half not in (None, "encoder", "decoder"):
        raise ValueError(f"half is {half!r}; accepted: encoder, decoder, or None for all layers")
    record = window_record(config, layout).nbytes
    windows = (plan.window for plan in layer_plan(config) if plan.window and half in (None, plan.half))
    return sum(window * record for window in windows)


def pool_sequences(config: V41Config, host_bytes: int, *, share: Fraction = Fraction(1, 10)) -> int:
    """Sequences whose encoder windows fit into the pool: `share` (10 %) of a machine's host memory (V4.1 report
    3.2.1).
    """
    if not isinstance(config, V41Config):
        raise ValueError(f"model_type is {config.model_type!r}; accepted: deepseek_v41, which pools encoder windows")
    return int(host_bytes * share // window_snapshot_bytes(config, half="encoder"))


def turn_tokens_for_window_share(config: V4Config, share: Number) -> Fraction:
    """New tokens a turn at which windows are this share of what it adds to the persistent cache.

        share = window / (window + per_token * T), so T = window * (1 - share) / (share * per_token)

    >>> from flashsim.config import load_config
    >>> round(turn_tokens_for_window_share(load_config("v4-flash"), Fraction(1, 2)))
    1829
    """
    if not isinstance(config, V4Config):
        raise ValueError(f"model_type is {config.model_type!r}; accepted: deepseek_v4, which stores window snapshots")
    share = Fraction(share)
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; accepted: a number between 0 and 1")
    one = persistent_cache(config, 1).by("tier")
    return one["window"] * (1 - share) / (share * Fraction(one["global"]))


def window_bytes_per_token(config: CompressedConfig, *, layout: Layout | str | Mapping | None = None) -> int:
    """Bytes a token if every token's window record of every layer were kept, before any snapshot policy.

    V4-Flash 25,112: the V4 report's "approximately 8 times" its compressed main KV.

    >>> from flashsim.config import load_config
    >>> window_bytes_per_token(load_config("v4-flash"))
    25112
    """
    return sum(window_record(config, layout).nbytes for plan in layer_plan(config) if plan.window)


def replay_tokens(config: CompressedConfig) -> dict[str, int]:
    """Tokens to run again after a hit that has global KV and no window (V4.1 report 3.2.1-3.2.2).

    `exact`: num_hidden_layers * sliding_window. `bounded`: one window, V4.1's approximation. `none`: the windows are
    kept.

    >>> from flashsim.config import load_config
    >>> replay_tokens(load_config("v4.1-flash"))
    {'none': 0, 'bounded': 128, 'exact': 5120}
    """
    if not isinstance(config, CompressedConfig):
        raise ValueError(
            f"model_type is {config.model_type!r}; accepted: deepseek_v4, deepseek_v41, which have windows"
        )
    windowed = sum(1 for plan in layer_plan(config) if plan.window)
    return {"none": 0, "bounded": config.sliding_window, "exact": windowed * config.sliding_window}


# --- which rows run again -------------------------------------------------------------------------------------------

REPLAY_MODES = ("cold", "exact", "bounded")


@dataclass(frozen=True)
class ReplayRows:
    """The rows of a prompt of `prompt` tokens, `prefix` of which were stored, that a replay runs.

    The encoder half runs rows `encoder_start` to the end, the decoder half rows `decoder_start` to the end, each with
    windows that begin there.
    """

    mode: str
    prompt: int
    prefix: int
    encoder_start: int
    decoder_start: int

    @property
    def replayed(self) -> int:
        """Stored tokens whose rows run once more in the encoder half."""
        return self.prefix - self.encoder_start

    @property
    def decoder_rows(self) -> int:
        """Rows of the prompt that run in the decoder half."""
        return self.prompt - self.decoder_start


def tail_rows(config: V41Config, rollback: int = 0) -> int | None:
    """Rows W + (R - 1)(W - 1) that make the decoder half exact for the last row; None without an encoder-decoder.

    R are the layers after the one that ends the encoder half: the window of each needs W - 1 rows more of the layer
    below. `rollback` more rows make it exact for each of so many last tokens. Source: V4.1 report 3.2.

    >>> from flashsim.config import load_config
    >>> tail_rows(load_config("v4.1-flash"))
    2414
    """
    boundary = last_kv_source(config)
    if boundary is None:
        return None
    after, window = config.num_hidden_layers - boundary - 1, config.sliding_window
    return rollback + (window + (after - 1) * (window - 1) if after else 1)


def replay_rows(config: V41Config, prompt: int, prefix: int, mode: str = "bounded", *, rollback: int = 0) -> ReplayRows:
    """Which rows run when the global cache of the first `prefix` of `prompt` tokens was stored, the windows not.

        cold:     every row, nothing stored is used
        exact:    W - 1 rows for every layer: what the first of them lack is out of sight, the result is that of cold
        bounded:  one window before the prefix ends, one window of the prompt in the decoder half

    A replay starts at a multiple of every compression ratio, so that it begins with a group. An exact one is exact for
    the prompt without its last `rollback` tokens as well. Source: V4.1 report 3.2.1, 3.2.2; `model.replay` runs it.

    Raises:
        ValueError: another mode or family, or numbers of tokens that do not fit.

    >>> from flashsim.config import load_config
    >>> rows = replay_rows(load_config("v4.1-flash"), 100_000, 99_000)
    >>> rows.replayed, rows.decoder_rows
    (128, 128)
    >>> replay_rows(load_config("v4.1-flash"), 100_000, 99_000, "exact").replayed
    4082
    """
    if not isinstance(config, V41Config):
        raise ValueError(f"model_type is {config.model_type!r}; accepted: deepseek_v41, which replays windows")
    if mode not in REPLAY_MODES:
        raise ValueError(f"mode is {mode!r}; accepted: {', '.join(REPLAY_MODES)}")
    for name, value, low in (("prompt", prompt, 1), ("prefix", prefix, 0), ("rollback", rollback, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} is {value!r}; accepted: a whole number from {low}")
    if prefix > prompt:
        raise ValueError(f"prefix is {prefix}; accepted: at most the prompt's {prompt} tokens")
    window, layers, boundary = config.sliding_window, config.num_hidden_layers, last_kv_source(config)
    ratios = {plan.compress_ratio for plan in layer_plan(config) if plan.owns_kv} or {1}
    if mode == "cold":
        start = 0
    elif mode == "bounded":
        start = prefix - window
    else:
        encoder, kept = layers if boundary is None else boundary, prompt - rollback
        entries = min(prefix, kept) - max(ratios) + 1 - encoder * (window - 1)  # new ones and open groups are exact
        start = min(entries, kept - 1 - layers * (window - 1))  # the windows and the last row are exact
    step = math.lcm(*ratios)
    start = max(start, 0) // step * step
    tail = window if mode == "bounded" else tail_rows(config, rollback)
    below = start if boundary is None else max(prompt - tail, start)
    return ReplayRows(mode, prompt, prefix, start, below)
