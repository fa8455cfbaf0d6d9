"""What-if KV budgeting: how many sequences fit a fleet, and which configs fit a budget of bytes.

    >>> fit = capacity("v4.1-flash", Fleet("h200-sxm", gpus=8, tensor_parallel=8), {"128Ki": 1})
    >>> fit.sequences
    750

Nothing here says how good a model is. A config with fewer bytes keeps less; whether it still answers well is a matter
of training, which no formula of this library knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from flashsim.config import Config, DSAConfig, MLAConfig, V4Config, V41Config, load_config
from flashsim.flops import decode_flops
from flashsim.formats import BF16, MXFP4, MXFP8, BlockFormat, Layout
from flashsim.hardware import Device, device
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from flashsim.params import parameters
from flashsim.reading import ConfigError, Words
from flashsim.units import number_of_bytes, parse_context

# --- a fleet ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """GPUs, and what is on them besides the cache.

    device: a key of `data/hardware.toml` or a `Device`. gpus: in all. tensor_parallel: GPUs that share one replica of
    the model. weights_bytes: of one replica; None for `weight_bytes` of the config. kept_free: share of each GPU's
    memory for activations, graphs and fragments. layout: of the cache, None for the released one.

    Raises:
        ConfigError: names the field, its value and what is accepted.
    """

    device: str | Device
    gpus: int = 1
    tensor_parallel: int = 1
    weights_bytes: int | None = None
    kept_free: float | Fraction = Fraction(1, 10)
    layout: Layout | str | None = None

    def __post_init__(self):
        object.__setattr__(self, "device", device(self.device))
        _whole("device.memory_bytes", self.device.memory_bytes, 0)
        for name in ("gpus", "tensor_parallel"):
            _whole(name, getattr(self, name), 1)
        if self.gpus % self.tensor_parallel:
            raise ConfigError("gpus", self.gpus, f"a multiple of tensor_parallel, {self.tensor_parallel}")
        if self.weights_bytes is not None:
            _whole("weights_bytes", self.weights_bytes, 0)
        good = isinstance(self.kept_free, int | float | Fraction) and not isinstance(self.kept_free, bool)
        if not good or not 0 <= self.kept_free < 1:
            raise ConfigError("kept_free", Words(self.kept_free), "a share from 0 to below 1")

    @property
    def replicas(self) -> int:
        """Copies of the model, each on `tensor_parallel` GPUs."""
        return self.gpus // self.tensor_parallel


def _of(kind: type, name: str, value: Any) -> None:
    if not isinstance(value, kind):
        raise ConfigError(name, value, f"a {kind.__name__} of flashsim.budget")


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(name, value, f"a whole number from {low}")


_FP8_TILE = BlockFormat("FP8 FP32", 8, 32, 128 * 128)
_FP8_TILE_32 = BlockFormat("FP8 UE8M0", 8, 8, 32 * 32)

_WEIGHTS: Mapping[str, Mapping[str, BlockFormat]] = {
    "bf16": {},
    "fp8": {"always": _FP8_TILE, "routed": _FP8_TILE},
    "v4": {"always": _FP8_TILE, "routed": MXFP4},
    "v4.1": {"always": _FP8_TILE_32, "routed": MXFP4, "looked up": MXFP8},
}
"""How the parameters of each tier are stored in released weights; what is not named is BF16."""


def weight_bytes(config: Config | str, *, lookup_tables: bool = False) -> int:
    """Bytes of a model's weights in their released formats, from its parameter counts.

    BF16 for V1 and V2; FP8 with a scale for 128 x 128 numbers for V3 and V3.2; FP4 experts (a scale for 32) and FP8 for
    the rest in V4 and V4.1; embedding, head and norms BF16. Small matrices that a release keeps in BF16 (routers, norms
    and hyper-connections within layers) are counted as FP8: the sum is low by less than 1 %. Draft modules and vision
    are not counted. Engram tables, which are looked up row by row and can lie in host memory, are left out unless
    `lookup_tables`.

    >>> number_of_bytes(weight_bytes("v1"))
    '134,850,002,944 bytes (135 GB, 126 GiB)'
    """
    config = load_config(config)
    formats = _WEIGHTS[_release(config)]
    total = Fraction(0)
    for tier, number in parameters(config).by("tier").items():
        if tier == "looked up" and not lookup_tables:
            continue
        form = formats.get(tier, BF16)
        total += Fraction(number * form.element_bits, 8)
        if form.block_size:
            total += Fraction(number * form.scale_bits, 8 * form.block_size)
    return int(total)


def _release(config: Config) -> str:
    if isinstance(config, V41Config):
        return "v4.1"
    if isinstance(config, V4Config):
        return "v4"
    if isinstance(config, DSAConfig) or (isinstance(config, MLAConfig) and config.model_type == "deepseek_v3"):
        return "fp8"
    return "bf16"


@dataclass(frozen=True)
class Capacity:
    """What a fleet holds. Bytes are those of one GPU, exact; `limit` says in words what ends it.

    sequences: in all replicas together, of the whole mix. by_context: how many of each context, for one replica.
    """

    config: Config
    fleet: Fleet
    mix: Mapping[int, Fraction]
    weights_bytes: int
    free_bytes: int
    sequence_bytes: Mapping[int, int]
    tier_bytes: Mapping[str, int]
    by_context: Mapping[int, int]
    decode_flops: int | Fraction
    limit: str

    @property
    def per_replica(self) -> int:
        """Sequences of one replica."""
        return sum(self.by_context.values())

    @property
    def sequences(self) -> int:
        """Sequences of all replicas."""
        return self.per_replica * self.fleet.replicas

    @property
    def tokens(self) -> int:
        """Tokens held by all replicas."""
        return self.fleet.replicas * sum(n * count for n, count in self.by_context.items())

    def rows(self) -> list[dict[str, Any]]:
        """The same as a table: one row a quantity, with its unit."""
        fleet = self.fleet
        rows = [
            ("memory of a GPU", fleet.device.memory_bytes, "bytes"),
            ("weights on a GPU", self.weights_bytes, "bytes"),
            ("free for the cache of a GPU", self.free_bytes, "bytes"),
            *((f"cache of {n:,} tokens on a GPU", size, "bytes") for n, size in self.sequence_bytes.items()),
            *((f"cache on a GPU, {tier}", size, "bytes") for tier, size in self.tier_bytes.items()),
            *((f"sequences of {n:,} tokens in a replica", count, "sequences") for n, count in self.by_context.items()),
            ("sequences in all", self.sequences, "sequences"),
            ("tokens in all", self.tokens, "tokens"),
            ("decode FLOPs of the mean token, weighted", self.decode_flops, "FLOPs"),
        ]
        return [{"quantity": name, "value": value, "unit": unit} for name, value, unit in rows]

    def __str__(self) -> str:
        title = f"{self.config.name} on {self.fleet.gpus} x {self.fleet.device.name}"
        lines = [title, "=" * len(title)]
        for row in self.rows():
            value = row["value"]
            shown = f"{value:,}" if isinstance(value, int) else f"{float(value):,.1f}"
            lines.append(f"{row['quantity']:44} {shown:>24} {row['unit']}")
        return "\n".join([*lines, self.limit])


def capacity(config: Config | str, fleet: Fleet, context_mix: Mapping[Any, Any] | int | str) -> Capacity:
    """How many sequences fit, all of them at the full length of their context.

        free = memory (1 - kept_free) - weights_bytes / tensor_parallel             of one GPU
        sequences = the most for which  sum_n count_n kv_cache(n) <= free           count_n in the shares of the mix

    Tensor parallelism splits the KV heads of grouped-query attention; a latent or a shared vector is kept whole on
    every GPU, as `kv_cache(tensor_parallel=)` says. All bytes are *stored* bytes: what pages round up is
    `flashsim.kv_reserved`, and is to be covered by `kept_free`.

    Args:
        context_mix: tokens to share of the sequences, `{"4Ki": 3, "128Ki": 1}`; or one context.

    Raises:
        ConfigError: a share that is not above 0, an empty mix, no fleet.
        ContextError: a context that is none.

    >>> capacity("v1", Fleet("h100-sxm", gpus=8, tensor_parallel=8), "4Ki").by_context
    {4096: 276}
    """
    config, mix = load_config(config), _mix(context_mix)
    _of(Fleet, "fleet", fleet)
    memory = int(fleet.device.memory_bytes * (1 - Fraction(fleet.kept_free)))
    weights = -(
        -(weight_bytes(config) if fleet.weights_bytes is None else fleet.weights_bytes) // fleet.tensor_parallel
    )
    free = memory - weights
    options = {"layout": fleet.layout, "tensor_parallel": fleet.tensor_parallel}
    reports = {n: kv_cache(config, n, **options) for n in mix}
    sizes = {n: int(report.total()) for n, report in reports.items()}
    counts = _counts(sizes, mix, max(free, 0))
    tiers: dict[str, int] = {}
    for n, report in reports.items():
        for tier, size in report.by("tier").items():
            tiers[tier] = tiers.get(tier, 0) + int(size) * counts[n]
    flops = sum(share * decode_flops(config, n).weighted_total() for n, share in mix.items())
    needed = sum(sizes[n] * count for n, count in _shares(1, mix, sizes).items())
    if free < 0:
        limit = f"weights: they take {number_of_bytes(weights)} of {number_of_bytes(memory)} on each GPU"
    elif not any(counts.values()):
        limit = f"one sequence: it takes {number_of_bytes(needed)}, {number_of_bytes(free)} are free on each GPU"
    else:
        left = free - sum(sizes[n] * count for n, count in counts.items())
        limit = f"the cache: {number_of_bytes(left)} are left on each GPU, less than one more sequence of the mix"
    return Capacity(config, fleet, mix, weights, max(free, 0), sizes, tiers, counts, flops, limit)


def _mix(context_mix: Mapping[Any, Any] | int | str) -> dict[int, Fraction]:
    items = context_mix.items() if isinstance(context_mix, Mapping) else [(context_mix, 1)]
    mix: dict[int, Fraction] = {}
    for context, share in items:
        good = isinstance(share, int | float | Fraction) and not isinstance(share, bool)
        if not good or not 0 < share < float("inf"):
            raise ConfigError("context_mix", Words(share), "a share above 0 for each context")
        n = parse_context(context)
        mix[n] = mix.get(n, Fraction(0)) + Fraction(share)
    if not mix:
        raise ConfigError("context_mix", "empty", "one context, or a share for each of several")
    total = sum(mix.values())
    return {n: share / total for n, share in mix.items()}


def _shares(number: int, mix: Mapping[int, Fraction], sizes: Mapping[int, int]) -> dict[int, int]:
    """So many sequences in the shares of the mix, each count less than one away from its share.

    The largest sequences come first and sums are rounded, not counts: of so many sequences and of one more, the second
    has at least as many of each size or larger, so its bytes are more.
    """
    counts, share, before = {}, Fraction(0), 0
    for n in sorted(mix, key=lambda n: (-sizes[n], n)):
        share += mix[n]
        so_far = int(number * share + Fraction(1, 2))
        counts[n], before = so_far - before, so_far
    return {n: counts[n] for n in mix}


def _counts(sizes: Mapping[int, int], mix: Mapping[int, Fraction], free: int) -> dict[int, int]:
    """The most sequences of the mix whose bytes are at most `free`, halving the range that can hold their number."""
    fits, too_many = 0, free // min(sizes.values()) + 1
    while too_many - fits > 1:
        number = (fits + too_many) // 2
        if sum(sizes[n] * count for n, count in _shares(number, mix, sizes).items()) <= free:
            fits = number
        else:
            too_many = number
    return _shares(fits, mix, sizes)


# --- other models -----------------------------------------------------------------------------------------------------


def variant(
    config: V41Config | str = "v4.1-flash",
    *,
    encoder_ratio: int | None = None,
    decoder_ratio: int | None = None,
    encoder_owners: int | None = None,
    decoder_owners: int | None = None,
    window: int | None = None,
) -> V41Config:
    """A V4.1 config with other ratios, another number of layers that own a cache, or another window; None keeps.

    Owners of a half are spread evenly over its layers with a cache. A decoder with one owner is the causal
    encoder-decoder; with more, its layers have caches of their own and a prompt has to run through them, so the
    candidate pool, which is built from the one cache, goes too. Layers that select anew stay where a cache still is
    theirs.

    Raises:
        ConfigError: names the field, its value and what is accepted.

    >>> kv_bytes_per_token(variant(encoder_owners=1)), kv_bytes_per_token(variant(decoder_ratio=2))
    (534, 712)
    """
    config = load_config(config)
    if not isinstance(config, V41Config):
        raise ConfigError("config", config.name, "a V4.1 config, whose schedule can be varied")
    boundary = max(config.kv_source_layer_ids, default=config.num_hidden_layers)
    halves = {
        "encoder": [i for i, ratio in enumerate(config.compress_ratios) if ratio and i < boundary],
        "decoder": [i for i, ratio in enumerate(config.compress_ratios) if ratio and i >= boundary],
    }
    ratios, sources, selecting = list(config.compress_ratios), [], []
    asked = {"encoder": (encoder_ratio, encoder_owners), "decoder": (decoder_ratio, decoder_owners)}
    for half, layers in halves.items():
        ratio, number = asked[half]
        own = [i for i in config.kv_source_layer_ids if i in layers]
        anew = [i for i in config.index_source_layer_ids if i in layers]
        if ratio is not None:
            _whole(f"{half}_ratio", ratio, 1)
            if not layers:
                raise ConfigError(f"{half}_ratio", ratio, "None, as no layer there has a cache")
            for layer in layers:
                ratios[layer] = ratio
        if number is not None:
            _whole(f"{half}_owners", number, 1)
        if number is not None and number != len(own):
            if number > len(layers):
                raise ConfigError(f"{half}_owners", number, f"at most its {len(layers)} layers with a cache")
            own = [layers[len(layers) * i // number] for i in range(number)]
            anew = sorted({*own, *(anew if half == "decoder" else ())})
        sources += own
        selecting += anew
    if window is not None:
        _whole("window", window, 1)
    single = sum(i >= boundary for i in sources) == 1
    changes = {
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(sources),
        "index_source_layer_ids": tuple(selecting),
        "sliding_window": config.sliding_window if window is None else window,
        "candidate_source_layer_id": config.candidate_source_layer_id if single else -1,
    }
    return replace(config, **changes)


@dataclass(frozen=True)
class Constraints:
    """What `search` may choose from, one value or several for each; and the context at which FLOPs are counted.

    encoder_ratio, decoder_ratio: tokens an entry. encoder_owners, decoder_owners: layers that own a cache. main, index:
    encodings of entries and of indexer keys, names of `flashsim.formats.ENCODINGS`. window: tokens.
    """

    encoder_ratio: Sequence[int] = (1, 2, 4)
    decoder_ratio: Sequence[int] = (1, 2, 4)
    encoder_owners: Sequence[int] = (1, 2, 3, 6)
    decoder_owners: Sequence[int] = (1, 2, 4)
    main: Sequence[str] = ("fp4", "mxfp8")
    index: Sequence[str] = ("mxfp4", "fp8")
    window: Sequence[int] = (128,)
    base: V41Config | str = "v4.1-flash"
    context: int | str = "1M"
    choices: tuple[str, ...] = field(
        default=("encoder_ratio", "decoder_ratio", "encoder_owners", "decoder_owners", "main", "index", "window"),
        init=False,
    )

    def __post_init__(self):
        for name in self.choices:
            value = getattr(self, name)
            if not isinstance(value, int | str | Iterable):
                raise ConfigError(name, value, "one value or several")
            values = (value,) if isinstance(value, int | str) else tuple(value)
            if not values:
                raise ConfigError(name, "empty", "one value or several")
            object.__setattr__(self, name, values)
        parse_context(self.context)


class Point(NamedTuple):
    """One config: what was chosen, and what it stores and computes.

    stored_bytes: that a token adds, exact. decode_flops: weighted, of one token at the context of the search.
    window_bytes: of a sequence. kept_numbers: cached numbers a token, entries and keys, before any format: more is
    more detail.
    """

    choice: Mapping[str, Any]
    config: V41Config
    layout: Layout
    stored_bytes: int | Fraction
    window_bytes: int
    decode_flops: int | Fraction
    kept_numbers: Fraction

    def row(self) -> dict[str, Any]:
        """The choice and its numbers as one flat dict."""
        numbers = ("stored_bytes", "window_bytes", "decode_flops", "kept_numbers")
        return dict(self.choice) | {name: getattr(self, name) for name in numbers}


@dataclass(frozen=True)
class Search:
    """All points within the budget, and the `front`: those that no other beats in one objective and matches in all.

    Quality is not among the objectives: nothing here knows it.
    """

    budget_bytes: int | Fraction
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    tried: int
    constraints: Constraints

    @property
    def unchanged(self) -> Point | None:
        """The point that is the base config itself in its released formats; None where it is not within the budget."""
        base = load_config(self.constraints.base)
        size = kv_bytes_per_token(base)
        return next((p for p in self.points if p.config == base and p.stored_bytes == size), None)


OBJECTIVES = {"stored_bytes": 1, "decode_flops": 1, "window_bytes": 1, "kept_numbers": -1}
"""What a front may be about, and whether less (1) or more (-1) of it is better."""


def search(
    budget_bytes_per_token: int | Fraction,
    constraints: Constraints | None = None,
    *,
    objectives: Sequence[str] = ("stored_bytes", "decode_flops"),
) -> Search:
    """Every config of the constraints that stores at most so many bytes a token, and the best of them.

    With bytes and FLOPs alone the front lies at the edge of what the constraints allow: storing less is always cheaper.
    `kept_numbers` as a third objective asks what one gets for the bytes.

    Raises:
        ConfigError: a budget, a constraint or an objective that cannot be.

    >>> found = search(890)
    >>> found.tried, len(found.points), [point.stored_bytes for point in found.front]
    (432, 133, [178])
    >>> len(search(890, objectives=("stored_bytes", "decode_flops", "kept_numbers")).front)
    9
    """
    budget = budget_bytes_per_token
    if isinstance(budget, bool) or not isinstance(budget, int | float | Fraction) or not 0 < budget < float("inf"):
        raise ConfigError("budget_bytes_per_token", budget, "a number of bytes above 0")
    known = ", ".join(OBJECTIVES)
    if isinstance(objectives, str) or not isinstance(objectives, Sequence) or not objectives:
        raise ConfigError("objectives", objectives, f"a list of {known}")
    for name in objectives:
        if not isinstance(name, str) or name not in OBJECTIVES:
            raise ConfigError("objectives", name, known)
    constraints = Constraints() if constraints is None else constraints
    _of(Constraints, "constraints", constraints)
    every = list(_points(constraints))
    within = tuple(point for point in every if point.stored_bytes <= budget)
    return Search(budget, within, pareto(within, objectives), len(every), constraints)


def _points(constraints: Constraints) -> Iterator[Point]:
    context, names = parse_context(constraints.context), constraints.choices
    base = load_config(constraints.base)
    computed: dict[V41Config, tuple[int, Any]] = {}
    for values in itertools.product(*(getattr(constraints, name) for name in names)):
        choice = dict(zip(names, values, strict=True))
        config = variant(base, **{name: value for name, value in choice.items() if name not in ("main", "index")})
        layout = Layout.of({"main": choice["main"], "index": choice["index"]})
        if config not in computed:
            computed[config] = (
                kv_cache(config, context).by("tier")["window"],
                decode_flops(config, context).weighted_total(),
            )
        window, flops = computed[config]
        kept = sum(
            Fraction(config.head_dim + config.index_head_dim, config.compress_ratios[layer])
            for layer in config.kv_source_layer_ids
        )
        yield Point(choice, config, layout, kv_bytes_per_token(config, layout=layout), window, flops, kept)


def pareto(points: Sequence[Point], objectives: Sequence[str]) -> tuple[Point, ...]:
    """The points that no other is as good as in every objective and better than in one; of equals the first."""
    scores = [tuple(OBJECTIVES[name] * getattr(point, name) for name in objectives) for point in points]
    front, seen = [], set()
    for i in sorted(range(len(points)), key=lambda i: (scores[i], i)):
        mine = scores[i]
        beaten = any(all(a <= b for a, b in zip(scores[j], mine, strict=True)) for j in front)
        if not beaten and mine not in seen:
            seen.add(mine)
            front.append(i)
    return tuple(points[i] for i in front)


def compare(
    configs: Sequence[Config | str], context: int | str = "1M", fleet: Fleet | None = None
) -> list[dict[str, Any]]:
    """One row a config: stored bytes a token, bytes of a sequence by tier, weighted decode FLOPs, sequences that fit.

    >>> [row["stored_bytes_per_token"] for row in compare(["v1", "v4.1-flash"])]
    [389120, 890]
    """
    if isinstance(configs, str) or not isinstance(configs, Sequence):
        raise ConfigError("configs", configs, "a list of configs")
    if fleet is not None:
        _of(Fleet, "fleet", fleet)
    rows = []
    for source in configs:
        config = load_config(source)
        report = kv_cache(config, parse_context(context))
        row = {
            "model": config.name,
            "stored_bytes_per_token": kv_bytes_per_token(config),
            **{f"{tier}_bytes": size for tier, size in report.by("tier").items()},
            "decode_flops": decode_flops(config, parse_context(context)).weighted_total(),
        }
        if fleet is not None:
            row["sequences"] = capacity(config, fleet, context).sequences
        rows.append(row)
    return rows
