"""Pictures that change while one looks, as light SVG and HTML: layer map, block of numbers, selection, replay.

Each function takes plain values and returns a text that any page can show; what cannot be becomes one sentence in its
place. No drawing package, a few milliseconds a picture. The numbers are those of `flashsim.pictures`, which draws the
same things for print. `flashsim.widgets` puts knobs on them.
"""

from __future__ import annotations

import base64
import html
import math
import random
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from flashsim.config import Config
from flashsim.drawing import INK, LESS, MORE, MUTED, PALE, RULE, FigureError
from flashsim.persistent import replay_rows
from flashsim.pictures.formats import EXPONENT, KINDS, MANTISSA, SIGN, Block, encode_block, short
from flashsim.pictures.replay import STATES, replay_map
from flashsim.pictures.schedule import ROLES, cache_spans, describe, layer_map, selection_spans
from flashsim.pictures.selection import Selection, select
from flashsim.schedule import layer_plan
from flashsim.units import number

GREEN, AMBER = "#009E73", "#E69F00"


def svg(width: int, height: float, title: str, words: str, body: str) -> str:
    """An inline SVG with its title and, for who does not see it, its words."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{width}' height='{height:.0f}' "
        f"viewBox='0 0 {width} {height:.0f}' font-family='sans-serif' font-size='12' fill='{INK}' "
        f"style='background:white;max-width:100%'>"
        f"<title>{html.escape(title)}</title><desc>{html.escape(words)}</desc>{body}</svg>"
    )


def as_images(page: str) -> str:
    """The same HTML with each SVG as an image: a page that does not trust its input shows those alone."""

    def image(found: re.Match) -> str:
        drawn = found[0]
        words = ". ".join(re.findall(r"<(?:title|desc)>(.*?)</", drawn))
        data = base64.b64encode(drawn.encode()).decode()
        return f"<img alt='{words}' src='data:image/svg+xml;base64,{data}'/>"

    return re.sub(r"<svg.*?</svg>", image, page, flags=re.DOTALL)


def text(x: float, y: float, words: object, anchor: str = "start", **looks: str) -> str:
    """Text of an SVG; `looks` are its attributes, with `_` for `-`."""
    more = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in looks.items())
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{more}>{html.escape(str(words))}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, **looks: str) -> str:
    """A rectangle of an SVG."""
    more = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in looks.items())
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0):.1f}' height='{height:.1f}' fill='{fill}'{more}/>"


def sentence(words: object) -> str:
    """What went wrong, as one line of HTML that a screen reader announces."""
    return f"<p role='alert' style='color:{MORE};background:white'>{html.escape(' '.join(str(words).split()))}</p>"


def _caption(words: str) -> str:
    """What a picture says, below it, read out when it changes."""
    return f"<p aria-live='polite' style='color:{INK};background:white'>{words}</p>"


def said(build: Callable[..., str]) -> Callable[..., str]:
    """A picture whose errors are sentences in its place."""

    @wraps(build)
    def shown(*args: Any, **options: Any) -> str:
        try:
            return build(*args, **options)
        except ValueError as error:  # every error of this library that bad input causes is one
            return sentence(error)

    return shown


# --- the layer map ----------------------------------------------------------------------------------------------------


@said
def layer_html(config: Config, layer: int = 0, width: int = 760) -> str:
    """Every layer's role, whose cache it reads and whose selection it uses; one layer framed and described.

    >>> from flashsim.config import load_config
    >>> "reads the entries of layer 20" in layer_html(load_config("v4.1-flash"), 24)
    True
    """
    words, plans = describe(config, layer), layer_plan(config)
    row = layer_map(config)[layer]
    left, step = 96, (width - 106) / len(plans)
    parts = []
    for plan in plans:
        letter, colour, _ = ROLES[plan.role]
        x = left + step * plan.layer
        parts.append(box(x, 22, step - 1, 22, colour))
        if step >= 10:
            parts.append(text(x + step / 2, 37, letter, "middle", font_size="11"))
        if plan.layer % (1 if step >= 24 else 4 if step >= 7 else 16) == 0:
            parts.append(text(x + step / 2, 14, plan.layer, "middle", fill=MUTED, font_size="10"))
    lanes = (
        ("main KV of", cache_spans(config), 56, "#CFE3F1"),
        ("selection of", selection_spans(config), 82, "#F6DFC4"),
    )
    for name, spans, y, colour in lanes:
        parts.append(text(left - 8, y + 13, name, "end", fill=MUTED))
        for span in spans:
            x, wide = left + step * span.first, step * (span.last - span.first + 1)
            parts.append(box(x, y, wide - 1, 18, colour))
            if wide >= 16:
                parts.append(text(x + wide / 2, y + 13, span.source, "middle", font_size="11"))
    parts.append(text(left - 8, 37, "role", "end", fill=MUTED))
    parts.append(box(left + step * layer - 1, 19, step + 1, 84, "none", stroke=INK, stroke_width="2"))
    used = dict.fromkeys(plan.role for plan in plans)
    x = left
    for role in used:
        parts.append(box(x, 112, 14, 12, ROLES[role][1]))
        parts.append(text(x + 18, 122, f"{ROLES[role][0]} {role}", fill=MUTED))
        x += 92
    picture = svg(width, 130, f"Layers of {config.name}", words, "".join(parts))
    bytes_of = f"{number(row['stored_bytes_per_token'])} bytes a token, window {row['window_bytes']:,} bytes"
    return picture + _caption(f"{html.escape(words)} Stores {bytes_of}.")


# --- a block of numbers -----------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf|nan", re.IGNORECASE)


def numbers_of(words: str) -> list[float]:
    """Numbers with spaces, commas, semicolons or line breaks between them.

    Raises:
        FigureError: something that is no number, or far too much of it.

    >>> numbers_of("0.25, -1.25\\n2.5")
    [0.25, -1.25, 2.5]
    """
    pieces = re.split(r"[\s,;]+", words[:10_000].strip())
    pieces = [] if pieces == [""] else pieces
    for piece in pieces:
        if not NUMBER.fullmatch(piece):
            raise FigureError(
                "values", repr(piece[:40]), "numbers such as 0.25 -1.5 3e-2, with spaces or commas between"
            )
    return [float(piece) for piece in pieces]


@said
def block_html(words: str, kind: str = "fp4") -> str:
    """The numbers of a text as one block: bits, scale, what comes back and the error of each.

    >>> "accepted: 1 to 16" in block_html("1 " * 17)
    True
    """
    block = encode_block(numbers_of(words), kind)
    scale = block.kind.scale
    largest = max((abs(e) for e in block.errors if math.isfinite(e)), default=0.0)
    rows = []
    for row, code in zip(block.table(), block.codes, strict=True):
        cells = (
            short(row["value"]), short(row["value_over_scale"]), _bits(block, code), f"<b>{short(row['decoded'])}</b>",
            short(row["error"]), _bar(row["error"], largest),
        )  # fmt: skip
        rows.append("".join(f"<td style='text-align:right;padding:0 10px'>{cell}</td>" for cell in cells))
    heads = ("value", "value / scale", "stored bits", "decoded", "error", "")
    head = "".join(f"<th scope='col' style='text-align:right;padding:0 10px'>{name}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    about = (
        f"scale {short(block.scale)}, {scale.name} bits {scale.bits(block.scale_code)}; "
        f"{len(block.codes)} x {block.kind.element.width} + {scale.width} bits; as stored: {block.packed().hex(' ')}"
    )
    look = "border-collapse:collapse;width:auto;margin:0;font-variant-numeric:tabular-nums"
    return (
        f"<div style='background:white;color:{INK}'><p aria-live='polite'>{html.escape(about)}</p>"
        f"<table style='{look}'><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table><p style='color:{MUTED}'>pink: sign, blue: exponent, yellow: mantissa</p></div>"
    )


def _bits(block: Block, code: int) -> str:
    form = block.kind.element
    colours = [SIGN] * form.sign_bits + [EXPONENT] * form.exponent_bits + [MANTISSA] * form.mantissa_bits
    digits = zip(format(code, f"0{form.width}b"), colours, strict=True)
    return "".join(
        f"<span style='background:{colour};color:{INK};font-family:monospace;padding:0 4px;margin:0 1px'>{bit}</span>"
        for bit, colour in digits
    )


def _bar(error: float, largest: float) -> str:
    """An error as a bar to the left or to the right of a line."""
    share = error / largest if largest and math.isfinite(error) else 0.0
    low, high = sorted((40.0, 40.0 + 38 * share))
    line = f"<line x1='40' x2='40' y1='0' y2='14' stroke='{RULE}'/>"
    bar = box(low, 2, high - low, 10, MORE if share > 0 else LESS)
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='80' height='14' aria-hidden='true'>{line}{bar}</svg>"


KIND_NAMES = {"FP4, E4M3 scale (entries)": "fp4", "MXFP4 (indexer keys)": "mxfp4", "MXFP8 (window)": "mxfp8"}
"""What a reader picks, and the kind of `flashsim.pictures.formats.KINDS` that it is."""
assert set(KIND_NAMES.values()) == set(KINDS)


# --- a selection ------------------------------------------------------------------------------------------------------


def drawn_scores(count: int, seed: int = 0) -> list[float]:
    """Scores as an indexer makes them: sums of two ReLUs, many of them exactly zero.

    >>> drawn_scores(4, 1)
    [1.94, 0.0, 0.0, 0.0]
    """
    draw = random.Random(seed)
    return [round(sum(max(draw.gauss(-0.4, 1.0), 0.0) for _ in range(2)), 2) for _ in range(count)]


@said
def selection_html(
    position: int = 47,
    k: int = 6,
    *,
    ratio: int = 1,
    window: int = 8,
    block_size: int = 4,
    keep_blocks: int = 0,
    scores: str | Sequence[float] = (),
    seed: int = 0,
    width: int = 760,
) -> str:
    """What the query at a position selects: `scores`, typed or drawn with a seed, the pool's blocks, the window.

    With `keep_blocks` the candidate pool is the best blocks of a first scan, and only entries in it can be chosen, as
    in a Reindex layer.
    """
    given = numbers_of(scores) if isinstance(scores, str) else list(scores)
    _limits(position=(position, 0, 1023), ratio=(ratio, 1, 4096), keep_blocks=(keep_blocks, 0, 4096))
    given = given or drawn_scores((position + 1) // ratio, seed)
    options = {"position": position, "ratio": ratio, "window": window}
    if keep_blocks:
        pool = select(given, k, **options, block_size=block_size, keep_blocks=keep_blocks).pool
        chosen = select(given, k, **options, block_size=block_size, pool=pool)
    else:
        chosen = select(given, k, **options)
    return _selection_svg(chosen, width)


def _limits(**fields: tuple[Any, int, int]) -> None:
    for name, (value, low, high) in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FigureError(name, repr(value), f"a whole number from {low} to {high:,}")


def _selection_svg(chosen: Selection, width: int) -> str:
    left, room = 62, 120
    step = (width - left - 10) / max(chosen.position + 1, 8)
    finite = [score for score in chosen.scores if math.isfinite(score)]
    high, low = max([*finite, 0.0]), min([*finite, 0.0])
    unit = room / ((high - low) or 1.0)
    zero = 14 + high * unit
    bottom = 14 + room
    parts = [f"<line x1='{left}' x2='{width - 10}' y1='{zero:.1f}' y2='{zero:.1f}' stroke='{RULE}'/>"]
    parts += [text(left - 6, 18, short(high), "end", fill=MUTED), text(left - 6, zero + 4, "0", "end", fill=MUTED)]
    for entry, score in enumerate(chosen.scores):
        taken, inside = entry in chosen.entries, chosen.in_pool(entry)
        first = chosen.tokens(entry)[0]
        tall = (score if math.isfinite(score) else 0.0) * unit
        colour = MORE if taken else LESS if inside else PALE
        x, wide = left + step * first, step * chosen.ratio
        parts.append(box(x + wide * 0.1, zero - max(tall, 0), wide * 0.8, max(abs(tall), 1.5), colour))
        if taken:
            parts.append(f"<circle cx='{x + wide / 2:.1f}' cy='{zero - max(tall, 0) - 6:.1f}' r='3' fill='{MORE}'/>")
    if chosen.pool is not None:
        parts.append(text(left - 6, bottom + 21, "pool", "end", fill=MUTED))
        for block in chosen.pool:
            first = block * chosen.block_size * chosen.ratio
            last = min((block + 1) * chosen.block_size, len(chosen.scores)) * chosen.ratio
            parts.append(box(left + step * first, bottom + 12, step * (last - first) - 1, 10, AMBER))
    if chosen.window_tokens:
        seen = chosen.window_tokens
        parts.append(text(left - 6, bottom + 39, "window", "end", fill=MUTED))
        parts.append(box(left + step * seen[0], bottom + 30, step * len(seen), 10, GREEN))
    parts.append(text(left, bottom + 58, "token 0", fill=MUTED))
    parts.append(
        text(left + step * (chosen.position + 1), bottom + 58, f"token {chosen.position}, the query", "end", fill=MUTED)
    )
    words = f"{len(chosen.entries)} of {len(chosen.scores)} visible entries chosen: "
    words += f"{', '.join(map(str, chosen.entries[:40])) or 'none'}{' ...' if len(chosen.entries) > 40 else ''}."
    if chosen.ties:
        words += f" {len(chosen.ties)} lost a tie to a lower number."
    if chosen.pool is not None:
        words += f" {sum(map(chosen.in_pool, range(len(chosen.scores))))} were in the pool."
    picture = svg(width, bottom + 64, "Index scores of the visible entries", words, "".join(parts))
    legend = "orange with a dot: chosen; blue: scored, not chosen; grey: not in the pool"
    return picture + _caption(f"{html.escape(words)}<br><span style='color:{MUTED}'>{legend}</span>")


# --- a replay ---------------------------------------------------------------------------------------------------------

STATE_COLOURS = {"not run": PALE, "exact": LESS, "cut": MORE, "entry": AMBER}


@said
def replay_html(config: Config, prompt: int, prefix: int, mode: str = "bounded", width: int = 760) -> str:
    """Layers against positions: which rows run again after a hit of `prefix` tokens, and which are exact."""
    rows = replay_rows(config, prompt, prefix, mode)
    layers = replay_map(config, rows)
    low = min(rows.encoder_start, prefix)
    first = max(low - max((prompt - low) // 6, 2), 0)
    left, tall = 46, max(6.0, min(16.0, 300 / len(layers)))
    unit = (width - left - 10) / (prompt - first)
    parts = []
    for layer in layers:
        y = 20 + tall * layer.layer
        for state, start, end in layer.spans:
            start = max(start, first)
            if end > start:
                parts.append(
                    box(left + unit * (start - first), y, unit * (end - start), tall - 1, STATE_COLOURS[state])
                )
    bottom = 20 + tall * len(layers)
    for layer in {0, len(layers) - 1, *(layer.layer for layer in layers if layer.stored_bytes)}:
        parts.append(text(left - 6, 20 + tall * (layer + 0.5) + 4, layer, "end", fill=MUTED, font_size="10"))
    mark = left + unit * (prefix - first)
    parts.append(f"<line x1='{mark:.1f}' x2='{mark:.1f}' y1='14' y2='{bottom:.1f}' stroke='{INK}' stroke-width='2'/>")
    parts.append(text(min(max(mark, left + 40), width - 50), 11, "stored | new", "middle"))
    parts.append(text(left, bottom + 14, f"position {first:,}", fill=MUTED))
    parts.append(text(width - 10, bottom + 14, f"{prompt - 1:,}", "end", fill=MUTED))
    shown = dict.fromkeys(span.state for layer in layers for span in layer.spans)
    for i, state in enumerate(shown):
        x, y = left + 340 * (i % 2), bottom + 24 + 18 * (i // 2)
        parts += [box(x, y, 14, 12, STATE_COLOURS[state]), text(x + 20, y + 10, STATES[state], fill=MUTED)]
    words = (
        f"{mode} replay of {prompt:,} tokens, {prefix:,} of them stored: {rows.replayed:,} stored tokens run again in "
        f"the encoder half, {rows.decoder_rows:,} rows in the decoder half. The last row behind the last layer: "
        f"{STATES[layers[-1].spans[-1].state]}."
    )
    picture = svg(width, bottom + 66, f"Replay of {config.name}", words, "".join(parts))
    return picture + _caption(html.escape(words))
