"""The KV budget explorer without its knobs: settings in, numbers, a waterfall and tables out. Standard library only.

    >>> view = explore(Settings(model="v4.1-flash", decoder_owners=20))
    >>> view.per_token_bytes
    7654

`flashsim.widgets` puts sliders on it, and a browser's Python can call it as it is. What cannot be comes back as one
sentence in `View.error`, never as a number.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from flashsim.budget import Capacity, Fleet, capacity, variant
from flashsim.config import CompressedConfig, Config, V41Config, load_config
from flashsim.drawing import INK, LESS, MORE, MUTED, PALE
from flashsim.flops import decode_flops
from flashsim.formats import Layout, LayoutError
from flashsim.hardware import device
from flashsim.kv_cache import ParallelError, kv_bytes_per_token, kv_cache
from flashsim.live import box, sentence, svg, text
from flashsim.reading import ConfigError
from flashsim.units import ContextError, number, parse_context

GIGA = 10**9
MAIN_BITS = {"released": None, "BF16": "bf16", "FP8": "mxfp8", "FP4": "fp4"}
"""Choices for entries; the layout that each is."""
INDEX_BITS = {"released": None, "BF16": "bf16", "FP8": "fp8", "FP4": "mxfp4"}


@dataclass(frozen=True)
class Settings:
    """Everything that can be turned. None keeps what the model has.

    model: a preset, a path, the fields of a config.json or its text. sequences: how many run at once. memory_gb,
    weights_gb: in 10^9 bytes, of one GPU and of the whole model; None for those of the device and of the release. The
    next four are of V4.1 configs alone: layers of each half that own a cache, tokens an entry there. encoder_decoder
    False gives every decoder layer a cache of its own. main, index: `MAIN_BITS`, `INDEX_BITS`. window: tokens.
    """

    model: Any = "v4.1-flash"
    context: int | str = "128Ki"
    sequences: int = 1
    device: str = "h200-sxm"
    gpus: int = 8
    tensor_parallel: int = 8
    memory_gb: float | None = None
    weights_gb: float | None = None
    encoder_owners: int | None = None
    decoder_owners: int | None = None
    encoder_ratio: int | None = None
    decoder_ratio: int | None = None
    encoder_decoder: bool = True
    main: str = "released"
    index: str = "released"
    window: int | None = None


class Bar(NamedTuple):
    """One step of the waterfall: what changes, and bytes a token before and after it."""

    label: str
    before: int | Fraction
    after: int | Fraction


@dataclass(frozen=True)
class View:
    """What the explorer shows. Bytes are exact. `error` is one sentence, and then nothing else is there."""

    settings: Settings
    config: Config | None = None
    layout: Layout | None = None
    per_token_bytes: int | Fraction = 0
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    waterfall: tuple[Bar, ...] = ()
    capacity: Capacity | None = None
    decode_flops: int | Fraction = 0
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence."""
        return sum(self.tier_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the sequences that were asked for fit the fleet."""
        return self.capacity is not None and self.settings.sequences <= self.capacity.sequences

    def rows(self) -> list[tuple[str, str, str]]:
        """(quantity, value, unit) of everything, for a table to copy."""
        if self.error:
            return [("error", self.error, "")]
        asked, fit = self.settings, self.capacity
        rows = [
            ("model", self.config.name, ""),
            ("layout", str(self.layout), ""),
            ("context", f"{parse_context(asked.context):,}", "tokens"),
            ("stored by a token", number(self.per_token_bytes), "bytes"),
            *((f"one sequence, {tier}", f"{size:,}", "bytes") for tier, size in self.tier_bytes.items()),
            ("one sequence", f"{self.sequence_bytes:,}", "bytes"),
            ("all sequences asked for", f"{asked.sequences * self.sequence_bytes:,}", "bytes"),
            ("decode FLOPs of a token, weighted", number(round(self.decode_flops)), "FLOPs"),
            ("weights on a GPU", f"{fit.weights_bytes:,}", "bytes"),
            ("free for the cache of a GPU", f"{fit.free_bytes:,}", "bytes"),
            ("sequences that fit", f"{fit.sequences:,}", "sequences"),
            ("the sequences asked for fit", "yes" if self.fits else "no", ""),
        ]
        return rows + [("note", note, "") for note in self.notes]


def explore(settings: Settings) -> View:
    """Everything that follows from the settings."""
    try:
        return _explore(settings)
    except (ConfigError, ContextError, LayoutError, ParallelError) as error:
        return View(settings, error=str(error))


def _explore(asked: Settings) -> View:
    check(asked)
    config, notes = model_of(asked.model), []
    context = parse_context(asked.context)
    chosen = _varied(config, asked, notes)
    layout = Layout.of({"main": MAIN_BITS[asked.main] or "released", "index": INDEX_BITS[asked.index] or "released"})
    fleet = _fleet(asked, layout)
    report = kv_cache(chosen, context, layout=layout)
    fit = capacity(chosen, fleet, context)
    if asked.weights_gb is None and isinstance(chosen, V41Config):
        notes.append("Engram tables are taken to lie in host memory")
    return View(
        asked,
        chosen,
        layout,
        kv_bytes_per_token(chosen, layout=layout),
        {tier: int(size) for tier, size in report.by("tier").items()},
        _waterfall(config, chosen, layout),
        fit,
        decode_flops(chosen, context).weighted_total(),
        (*notes, fit.limit),
    )


def check(asked: Settings) -> None:
    """Whether the settings that hold for every model can be.

    Raises:
        ConfigError: one cannot; names it, its value and what is accepted.
    """
    device(asked.device)
    for name in ("sequences", "gpus", "tensor_parallel"):
        value = getattr(asked, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
            raise ConfigError(name, value, "a whole number from 1 to 1,000,000,000")
    for name, low in (("memory_gb", 0), ("weights_gb", -1)):
        value = getattr(asked, name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low < value < 10**9
        if value is not None and not (good and value >= 0):
            raise ConfigError(name, value, "a number of 10^9 bytes, or nothing")
    if not isinstance(asked.encoder_decoder, bool):
        raise ConfigError("encoder_decoder", asked.encoder_decoder, "True, False")
    for name, accepted in (("main", MAIN_BITS), ("index", INDEX_BITS)):
        if not isinstance(getattr(asked, name), str) or getattr(asked, name) not in accepted:
            raise ConfigError(name, getattr(asked, name), ", ".join(accepted))


def model_of(source: Any) -> Config:
    """The config of a preset name, a path, fields, or the text of a config.json.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ConfigError("model", source, f"the text of a config.json ({error})") from None
    return load_config(source)


def model_text(source: Any) -> str:
    """The fields of a model as the text of a config.json; where it is none, what was given, to be corrected."""
    try:
        return json.dumps(model_of(source).to_dict(), indent=2)
    except ConfigError:
        return str(source)


MECHANISMS = ("encoder_owners", "decoder_owners", "encoder_ratio", "decoder_ratio", "window")
"""The settings that change the schedule of a config."""


def mechanisms(config: Config) -> dict[str, tuple[int, int, int]]:
    """The settings of `MECHANISMS` that this config has: least, most, and its own value.

    A half whose layers have several ratios has none of its own, and one that was never there cannot be turned.

    >>> mechanisms(load_config("v4.1-flash"))["encoder_owners"]
    (1, 18, 3)
    """
    if not isinstance(config, CompressedConfig):
        return {}
    found = {"window": (1, max(1024, 2 * config.sliding_window), config.sliding_window)}
    if not isinstance(config, V41Config) or not config.kv_source_layer_ids:
        return found
    boundary = max(config.kv_source_layer_ids)
    for half, inside in (("encoder", lambda i: i < boundary), ("decoder", lambda i: i >= boundary)):
        layers = [i for i, ratio in enumerate(config.compress_ratios) if ratio and inside(i)]
        ratios = {config.compress_ratios[i] for i in layers}
        if layers:
            found[f"{half}_owners"] = (1, len(layers), sum(map(inside, config.kv_source_layer_ids)))
        if len(ratios) == 1:
            found[f"{half}_ratio"] = (1, 2**20, *ratios)
    return found


def _varied(config: Config, asked: Settings, notes: list[str]) -> Config:
    """The config with what was turned; a note for what it has no place for."""
    schedule = {name: getattr(asked, name) for name in ("encoder_owners", "encoder_ratio", "decoder_ratio")}
    schedule["decoder_owners"] = asked.decoder_owners
    if isinstance(config, V41Config) and config.kv_source_layer_ids:
        if not asked.encoder_decoder:
            boundary = max(config.kv_source_layer_ids)
            schedule["decoder_owners"] = sum(bool(r) for r in config.compress_ratios[boundary:])
        return variant(config, window=asked.window, **schedule)
    turned = [name for name, value in schedule.items() if value is not None]
    turned += [] if asked.encoder_decoder else ["encoder_decoder"]
    if turned:
        notes.append(f"{config.name} has no {', '.join(turned)}: not applied")
    if asked.window is not None:
        if not isinstance(config, CompressedConfig):
            notes.append(f"{config.name} has no sliding_window beside a compressed cache: not applied")
        else:
            config = replace(config, sliding_window=asked.window)
    return config


def _fleet(asked: Settings, layout: Layout) -> Fleet:
    chosen = device(asked.device)
    if asked.memory_gb is not None:
        chosen = replace(chosen, memory_bytes=int(asked.memory_gb * GIGA))
    weights = None if asked.weights_gb is None else int(asked.weights_gb * GIGA)
    return Fleet(chosen, asked.gpus, asked.tensor_parallel, weights, layout=layout)


def _waterfall(base: Config, config: Config, layout: Layout) -> tuple[Bar, ...]:
    """Bytes a token, one mechanism at a time, for V4.1 configs, whose halves are those of `base`; elsewhere what each
    component adds.
    """
    if not isinstance(config, V41Config) or not config.kv_source_layer_ids:
        total, bars = Fraction(0), []
        parts = kv_cache(config, 2**20, layout=layout).where(tier="global").by("component")
        whole = sum(parts.values())
        for component, size in parts.items():
            share = kv_bytes_per_token(config, layout=layout) * Fraction(size, whole)
            bars.append(Bar(component, total, total + share))
            total += share
        return tuple(bars)
    layers = [i for i, ratio in enumerate(config.compress_ratios) if ratio]
    boundary = max(base.kv_source_layer_ids)
    decoder = sum(i >= boundary for i in config.kv_source_layer_ids)
    own = replace(config, kv_source_layer_ids=tuple(layers), index_source_layer_ids=tuple(layers))
    own = replace(own, candidate_source_layer_id=-1)
    plain = replace(own, compress_ratios=tuple(1 if ratio else 0 for ratio in config.compress_ratios))
    encoder = tuple(i for i in config.kv_source_layer_ids if i < boundary)
    shared = (*encoder, *(i for i in layers if i >= boundary))
    half = replace(own, kv_source_layer_ids=shared, index_source_layer_ids=shared)
    steps: list[tuple[str, Config, Layout]] = [
        (f"{len(layers)} caches, BF16, an entry a token", plain, Layout.of("bf16")),
        ("tokens pooled into entries", own, Layout.of("bf16")),
        (f"encoder shares {len(encoder)}", half, Layout.of("bf16")),
        (f"decoder shares {decoder}", config, Layout.of("bf16")),
        ("bits of entries", config, replace(layout, index="bf16")),
        ("bits of indexer keys", config, layout),
    ]
    values = [kv_bytes_per_token(step, layout=form) for _, step, form in steps]
    bars = [Bar(steps[0][0], Fraction(0), values[0])]
    return (*bars, *(Bar(steps[i][0], values[i - 1], values[i]) for i in range(1, len(steps))))


# --- pictures without a drawing package -------------------------------------------------------------------------------


def table_text(view: View) -> str:
    """The rows with tabs between, to paste into a spreadsheet."""
    return "\n".join("\t".join(row) for row in view.rows())


def table_html(view: View) -> str:
    """The rows as an HTML table, the notes below it."""
    cells = "".join(
        f"<tr><th scope='row' style='text-align:left;font-weight:normal;padding-right:12px'>{html.escape(name)}</th>"
        f"<td style='text-align:right;font-variant-numeric:tabular-nums'>{html.escape(value)}</td>"
        f"<td style='text-align:left;padding-left:6px;color:{MUTED}'>{html.escape(unit)}</td></tr>"
        for name, value, unit in view.rows()
        if name != "note"
    )
    notes = "".join(f"<p style='margin:4px 0;color:{MUTED}'>{html.escape(note)}</p>" for note in view.notes)
    return f"<table style='border-collapse:collapse;width:auto;margin:0'>{cells}</table>{notes}"


def waterfall_svg(view: View, width: int = 660) -> str:
    """The waterfall as SVG with its numbers and words for who does not see it; an error is one line."""
    if view.error:
        return sentence(view.error)
    line, label, room = 26, 210, 110
    top = max((max(bar.before, bar.after) for bar in view.waterfall), default=0) or 1
    scale = Fraction(width - label - room) / top
    rows = [(bar.label, bar.before, bar.after) for bar in view.waterfall]
    rows.append(("stored by a token", Fraction(0), view.per_token_bytes))
    parts, words = [], []
    for i, (name, before, after) in enumerate(rows):
        low, high = sorted((before, after))
        colour = LESS if after < before else PALE if i in (0, len(rows) - 1) else MORE
        y, x, size = 6 + line * i, label + float(low * scale), max(float((high - low) * scale), 1.0)
        change = after - before
        shown = (
            number(after) if i in (0, len(rows) - 1) else f"{'+' if change > 0 else '−' * (change < 0)}{_short(change)}"
        )
        stroke = {"stroke": MUTED} if colour == PALE else {}
        parts.append(text(label - 8, y + 14, name, "end"))
        parts.append(box(x, y, size, line - 8, colour, **stroke))
        parts.append(text(x + size + 6, y + 14, shown))
        words.append(f"{name}: {number(after)}")
    height = line * len(rows) + 12
    title = f"{view.config.name}: {number(view.per_token_bytes)} bytes a token"
    return svg(width, height, title, ". ".join(words), "".join(parts))


TIER_COLOURS = {"global": LESS, "window": "#E69F00", "state": "#CC79A7"}


def memory_svg(view: View, width: int = 660) -> str:
    """Two bars as SVG: one sequence by tier, and one GPU with the sequences asked for; nothing for an error."""
    if view.error:
        return ""
    asked, fit = view.settings, view.capacity
    per_gpu = -(-asked.sequences // fit.fleet.replicas) * sum(fit.sequence_bytes.values())
    memory = fit.fleet.device.memory_bytes
    kept = memory - int(memory * (1 - Fraction(fit.fleet.kept_free)))
    free = max(memory - kept - fit.weights_bytes - per_gpu, 0)
    sequence = [(tier, size, TIER_COLOURS[tier]) for tier, size in view.tier_bytes.items()]
    gpu = [("weights", fit.weights_bytes, MUTED), ("caches", per_gpu, LESS), ("kept free", kept, PALE)]
    gpu.append(("free", free, "white"))
    parts, words, y = [], [], 4
    for name, pieces in (("one sequence", sequence), ("one GPU", gpu)):
        whole = sum(size for _, size, _ in pieces) or 1
        x, said = 110.0, []
        parts.append(text(102, y + 15, name, "end"))
        for piece, size, colour in pieces:
            wide = float(Fraction((width - 120) * size, whole))
            parts.append(box(x, y, wide, 20, colour, stroke=MUTED, stroke_width="0.5"))
            x += wide
            said.append(f"{piece} {_gb(size)}")
        if name == "one GPU" and whole > memory:
            end = 110 + float(Fraction((width - 120) * memory, whole))
            parts.append(
                f"<line x1='{end:.1f}' x2='{end:.1f}' y1='{y - 3}' y2='{y + 23}' stroke='{MORE}' stroke-width='3'/>"
            )
            said.append(f"more than its {_gb(memory)}, the orange line")
        labels = [(f"{piece} {_gb(size)}", colour) for piece, size, colour in pieces if size]
        x = max(8.0, min(110.0, width - sum(26 + 6.2 * len(label) for label, _ in labels)))
        for label, colour in labels:
            parts.append(box(x, y + 26, 10, 10, colour, stroke=MUTED, stroke_width="0.5"))
            parts.append(text(x + 14, y + 35, label, fill=MUTED, font_size="11"))
            x += 26 + 6.2 * len(label)
        words.append(f"{name}: {', '.join(said)}")
        y += 50
    return svg(width, y, "One sequence and one GPU", ". ".join(words), "".join(parts))


def _gb(size: int) -> str:
    """Bytes in three digits."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{float(Fraction(size, 10**power)):.3g} {unit}"
    return f"{size} bytes"


def _short(value: int | Fraction) -> str:
    return number(abs(value))


def headline(view: View) -> str:
    """The three numbers that the explorer is about, as HTML; an error is empty here, and stands in the picture."""
    if view.error:
        return ""
    fit = view.capacity.sequences
    shown = (
        (number(view.per_token_bytes), "bytes a token"),
        (f"{fit:,}", "sequences fit"),
        (f"{float(view.decode_flops) / GIGA:,.1f}", "GFLOPs a token"),
    )
    colour = INK if view.fits else MORE
    blocks = "".join(
        f"<div style='margin-right:2.5em'><div style='font-size:1.7em;color:{colour if i == 1 else INK}'>{value}</div>"
        f"<div style='color:{MUTED}'>{unit}</div></div>"
        for i, (value, unit) in enumerate(shown)
    )
    return f"<div style='display:flex' aria-live='polite'>{blocks}</div>"


def page(view: View) -> str:
    """Everything as one piece of static HTML, where no kernel runs."""
    return f"{headline(view)}{waterfall_svg(view)}{memory_svg(view)}{'' if view.error else table_html(view)}"
