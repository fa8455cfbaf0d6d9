"""Knobs on the pictures: the KV budget explorer, the layer map, an FP4 block, a selection, a replay.

    from flashsim.widgets import explorer
    explorer()

Each is an ipywidgets box around a pure function of `flashsim.explorer` or `flashsim.live`; every change calls that
function once and shows what it returns. All knobs take the keyboard: Tab goes on, arrows turn. Where no kernel runs,
the HTML that was shown first stands in. ipywidgets is imported when a widget is made.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any

from flashsim import explorer as budget
from flashsim import live
from flashsim.config import PRESETS, SMALL_PRESETS, Config, V41Config, load_config
from flashsim.hardware import devices
from flashsim.persistent import REPLAY_MODES
from flashsim.pictures.schedule import ROLES
from flashsim.reading import ConfigError
from flashsim.schedule import layer_plan

WIDE = {"description_width": "8.5em"}
NARROW = 540
"""Pixels of the explorer's pictures, so that they stand beside the knobs on a laptop."""
OWN = "own config.json"
"""The choice that takes the model from the text field."""

CONTEXTS = ("256", "1Ki", "4Ki", "16Ki", "32Ki", "64Ki", "128Ki", "256Ki", "512Ki", "1M", "1Mi", "4Mi")
RATIOS = (1, 2, 4, 8, 16, 64, 128)


class WidgetError(ValueError):
    """ipywidgets is not installed."""


@cache
def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise WidgetError("ipywidgets is not installed; accepted: pip install 'flashsim-kv[notebooks]'") from None
    return ipywidgets


@cache
def _live_box() -> type:
    """A box with its `knobs` by name, what is `shown`, and the HTML and words that stand in where no kernel runs."""

    class Live(_ipywidgets().VBox):
        static: str = ""
        words: str = ""
        knobs: Mapping[str, Any] = {}
        shown: Sequence[Any] = ()

        def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
            data = super()._repr_mimebundle_(**options)
            return data | {"text/html": self.static, "text/plain": self.words}

    return Live


def _box(rows: Sequence[Any], knobs: Mapping[str, Any], shown: Sequence[Any], show: Callable[[], None]) -> Any:
    """The box of these rows; `show` runs now and after every change of a knob that has a value."""
    made = _live_box()(list(rows))
    made.knobs, made.shown = dict(knobs), tuple(shown)
    for knob in knobs.values():
        if knob.has_trait("value"):
            knob.observe(lambda change: show(), names="value")
    show()
    made.static = live.as_images("".join(part.value for part in shown if isinstance(part, _ipywidgets().HTML)))
    last = made.shown[-1].value
    caption = re.search(r"<p[^>]*>(.*?)</p>", last, re.DOTALL)
    made.words = html.unescape(re.sub(r"<[^>]*>", " ", caption[1])) if caption else last
    return made


def _pictured(knobs: Mapping[str, Any], draw: Callable[..., str]) -> Any:
    """Knobs above one picture, which is `draw` of their values by name."""
    picture = _ipywidgets().HTML()

    def show() -> None:
        picture.value = draw(**{name: knob.value for name, knob in knobs.items()})

    return _box([*knobs.values(), picture], knobs, [picture], show)


# --- the KV budget explorer -------------------------------------------------------------------------------------------


def explorer(settings: budget.Settings | None = None) -> Any:
    """The KV budget explorer: knobs to the left, bytes, sequences and FLOPs to the right, live.

    What it shows is `flashsim.explorer.explore` of its settings, `box.knobs` are its knobs by the names of
    `Settings`. Knobs that a model does not have are off.

    Raises:
        ConfigError: settings of no knob, such as a GPU that is not known. A model or a context that cannot be stands
            in the picture, to be corrected.
    """
    w, start = _ipywidgets(), settings or budget.Settings()
    budget.check(start)
    own = not (isinstance(start.model, str) and start.model in (*PRESETS, *SMALL_PRESETS))
    text = budget.model_text(start.model) if own else ""
    layout = w.Layout(width="25em")

    def knob(kind: Any, words: str, **options: Any) -> Any:
        return kind(description=words, style=WIDE, layout=layout, **options)

    context = str(start.context)
    contexts = CONTEXTS if context in CONTEXTS else (*CONTEXTS, context)
    ranks = sorted({*(2**i for i in range(8)), start.tensor_parallel})
    knobs = {
        "model": knob(w.Dropdown, "model", options=[*PRESETS, *SMALL_PRESETS, OWN], value=OWN if own else start.model),
        "text": knob(w.Textarea, OWN, value=text, placeholder="paste the text of a config.json"),
        "context": knob(w.SelectionSlider, "context, tokens", options=contexts, value=context),
        "exactly": knob(w.Text, "or exactly", placeholder="such as 100000 or 1.5M", continuous_update=False),
        "sequences": knob(w.BoundedIntText, "sequences", value=start.sequences, min=1, max=10**9),
        "device": knob(
            w.Dropdown, "GPU", options=[(it.name, key) for key, it in devices().items()], value=start.device
        ),
        "gpus": knob(w.BoundedIntText, "GPUs", value=start.gpus, min=1, max=10**9),
        "tensor_parallel": knob(w.SelectionSlider, "GPUs a replica", options=ranks, value=start.tensor_parallel),
        "memory_gb": knob(w.Text, "GB a GPU", value=_blank(start.memory_gb), placeholder="of the GPU"),
        "weights_gb": knob(w.Text, "GB of weights", value=_blank(start.weights_gb), placeholder="as released"),
        "encoder_owners": knob(w.IntSlider, "encoder caches", min=1, max=1),
        "decoder_owners": knob(w.IntSlider, "decoder caches", min=1, max=1),
        "encoder_decoder": knob(w.Checkbox, "encoder-decoder", value=start.encoder_decoder, indent=True),
        "encoder_ratio": knob(w.SelectionSlider, "encoder ratio", options=RATIOS),
        "decoder_ratio": knob(w.SelectionSlider, "decoder ratio", options=RATIOS),
        "main": knob(w.Dropdown, "entries in", options=list(budget.MAIN_BITS), value=start.main),
        "index": knob(w.Dropdown, "indexer keys in", options=list(budget.INDEX_BITS), value=start.index),
        "window": knob(w.IntSlider, "window, tokens", min=1, max=1),
    }
    head, bars, memory, words = w.HTML(), w.HTML(), w.HTML(), w.HTML()
    copy = w.Textarea(description="to copy", style=WIDE, layout=w.Layout(width="60em", height="9em"))
    reset = w.Button(description="as released", tooltip="put the knobs of the mechanisms back", layout=layout)
    released: dict[str, Any] = {}
    turning = [False]

    def fit_knobs() -> None:
        """Ranges and values of the mechanisms' knobs, from the model that is chosen."""
        released.clear()
        with suppress(ConfigError):  # what is wrong stands in the picture as a sentence
            released.update(budget.mechanisms(budget.model_of(chosen_model())))
        turning[0] = True
        for name in budget.MECHANISMS:
            it = knobs[name]
            it.disabled = name not in released
            if name not in released:
                continue
            low, high, value = released[name]
            if hasattr(it, "min"):
                it.max, it.min = max(high, low), low
            elif value not in it.options:
                it.options = sorted({*RATIOS, value})
            it.value = value
        knobs["encoder_decoder"].disabled = "decoder_owners" not in released
        knobs["encoder_decoder"].value = True
        turning[0] = False

    def chosen_model() -> str:
        return (knobs["text"].value or "{}") if knobs["model"].value == OWN else knobs["model"].value

    def settings_now() -> budget.Settings:
        value = {name: it.value for name, it in knobs.items() if name not in ("text", "exactly", "as released")}
        for name in budget.MECHANISMS:
            if name not in released or value[name] == released[name][2]:
                value[name] = None  # as the model has it
        for name in ("memory_gb", "weights_gb"):
            value[name] = _number(value[name])
        exactly = knobs["exactly"].value.strip()
        return budget.Settings(**value | {"model": chosen_model(), "context": exactly or value["context"]})

    def show() -> None:
        if turning[0]:
            return
        view = budget.explore(settings_now())
        knobs["decoder_owners"].disabled = "decoder_owners" not in released or not knobs["encoder_decoder"].value
        head.value, bars.value = budget.headline(view), budget.waterfall_svg(view, NARROW)
        memory.value, words.value = budget.memory_svg(view, NARROW), "" if view.error else budget.table_html(view)
        copy.value = budget.table_text(view)

    def put_back(_: Any) -> None:
        turning[0] = True
        knobs["main"].value = knobs["index"].value = "released"
        fit_knobs()
        show()

    fit_knobs()
    turning[0] = True
    for name in budget.MECHANISMS:
        value = getattr(start, name)
        if value is None or name not in released:
            continue
        it = knobs[name]
        if hasattr(it, "min"):  # the knob reaches as far as it is asked to
            it.max, it.min = max(it.max, value), min(it.min, value)
        elif value not in it.options:
            it.options = sorted({*it.options, value})
        it.value = value
    knobs["encoder_decoder"].value = start.encoder_decoder
    turning[0] = False
    for name in ("model", "text"):
        knobs[name].observe(lambda change: fit_knobs(), names="value")  # before the box shows what comes of it
    reset.on_click(put_back)

    names = list(knobs)
    machine, mechanism = names[: names.index("encoder_owners")], names[names.index("encoder_owners") :]
    left = [_title("Model and machine"), *(knobs[name] for name in machine)]
    left += [_title("Mechanisms"), *(knobs[name] for name in mechanism), reset]
    shown = w.VBox([bars, memory, words], layout=w.Layout(margin="0 0 0 1em", width=f"{NARROW + 20}px"))
    together = w.HBox([w.VBox(left), shown], layout=w.Layout(flex_flow="row wrap"))
    rows = [head, together, copy]
    knobs["as released"] = reset
    return _box(rows, knobs, (head, bars, memory, words, copy), show)


def _title(words: str) -> Any:
    return _ipywidgets().HTML(f"<b>{html.escape(words)}</b>")


def _blank(value: float | None) -> str:
    return "" if value is None else str(value)


def _number(words: str) -> float | str | None:
    """A number, nothing, or the text itself where it is neither: the explorer says what is wrong with it."""
    words = words.strip().replace(",", "")
    if not words:
        return None
    try:
        return float(words)
    except ValueError:
        return words


# --- the mechanisms ---------------------------------------------------------------------------------------------------


def layer_map(config: Config | str = "v4.1-flash") -> Any:
    """Every layer as a button; pressed, it says what it keeps, whose cache it reads, whose selection it uses."""
    w, config = _ipywidgets(), load_config(config)
    picture, plans = w.HTML(live.layer_html(config, 0)), layer_plan(config)
    buttons = []
    for plan in plans:
        letter, colour, _ = ROLES[plan.role]
        button = w.Button(
            description=f"{plan.layer}{letter}",
            tooltip=f"layer {plan.layer}, {plan.role}",
            style={"button_color": colour, "text_color": "#222222"},
            layout=w.Layout(width="3.1em", margin="1px", padding="0"),
        )
        button.on_click(lambda _, layer=plan.layer: setattr(picture, "value", live.layer_html(config, layer)))
        buttons.append(button)
    rows = [w.HBox(buttons, layout=w.Layout(flex_flow="row wrap", max_width="64em")), picture]
    knobs = {f"layer {plan.layer}": button for plan, button in zip(plans, buttons, strict=True)}
    return _box(rows, knobs, [picture], lambda: None)


def block(values: Sequence[float] | str = "0.25 1.25 -2.5 5 0.1 6 -0.3 3.5 0 0.001 2 7 -7 4 0.75 -0.75") -> Any:
    """Numbers to type, and what a block of them is stored as: bits, scale, decoded values, errors."""
    w = _ipywidgets()
    words = values if isinstance(values, str) else " ".join(str(value) for value in values)
    knobs = {
        "words": w.Textarea(words, description="numbers", style=WIDE, layout=w.Layout(width="46em", height="3.6em")),
        "kind": w.ToggleButtons(options=live.KIND_NAMES, description="format", style=WIDE | {"button_width": "14em"}),
    }
    return _pictured(knobs, live.block_html)


def selection() -> Any:
    """A query among entries: scores drawn or typed, top-k, ratio, window and candidate pool to turn."""
    w = _ipywidgets()

    def slider(words: str, value: int, low: int, high: int) -> Any:
        return w.IntSlider(value, low, high, description=words, style=WIDE, layout=w.Layout(width="30em"))

    knobs = {
        "position": slider("position", 47, 0, 255),
        "k": slider("index_topk", 6, 1, 64),
        "ratio": slider("compress_ratio", 1, 1, 8),
        "window": slider("window", 8, 0, 64),
        "block_size": slider("block, entries", 4, 1, 16),
        "keep_blocks": slider("pool, blocks", 0, 0, 32),
        "seed": slider("other scores", 0, 0, 99),
        "scores": w.Text(
            "", description="or type scores", style=WIDE, placeholder="0 1.5 0 2", continuous_update=False
        ),
    }
    return _pictured(knobs, live.selection_html)


def replay(config: V41Config | str = "v4.1-flash") -> Any:
    """A prompt whose beginning was stored: which rows of which layers run again, cold, exact or bounded.

    Raises:
        ConfigError: a model of another family.
    """
    w, config = _ipywidgets(), load_config(config)
    if not isinstance(config, V41Config):
        raise ConfigError("config", config.name, "a V4.1 config, which replays windows")
    reach = config.num_hidden_layers * config.sliding_window
    most = 2 * reach

    def slider(words: str, value: int, low: int) -> Any:
        return w.IntSlider(
            value, low, most, step=max(reach // 80, 1), description=words, style=WIDE, layout=w.Layout(width="40em")
        )

    knobs = {
        "prompt": slider("prompt, tokens", most, max(reach // 80, 1)),
        "prefix": slider("stored, tokens", int(Fraction(3, 4) * most), 0),
        "mode": w.ToggleButtons(options=list(REPLAY_MODES), value="bounded", description="replay", style=WIDE),
    }
    return _pictured(knobs, lambda **values: live.replay_html(config, **values))
