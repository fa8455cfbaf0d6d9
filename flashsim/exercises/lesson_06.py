"""Lesson 06, the causal encoder-decoder."""

from flashsim.config import V41Config, load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.schedule import last_kv_source

PROMPT, SHORT = 100_000, 50


def _config() -> V41Config:
    return load_config("v4.1-flash")


def _layers() -> tuple[int, int]:
    """(layers of the encoder half, layers of the decoder half)."""
    boundary = last_kv_source(_config())
    return boundary, _config().num_hidden_layers - boundary


def _rows(tokens: int, tail: int) -> int:
    """Rows of all layers together for a prompt."""
    encoder, decoder = _layers()
    return encoder * tokens + decoder * tail


def _exact(layers: int) -> int:
    """Rows that make the last prediction exact when so many layers follow the first one of the decoder."""
    window = _config().sliding_window
    return window + (layers - 1) * (window - 1)


EXERCISES = (
    Exercise(
        "06.1",
        "The output of which layer of V4.1-Flash becomes the entries that all layers of the decoder half read?",
        "layer",
        lambda: last_kv_source(_config()) - 1,
        "The layer that compresses takes its input, and that is what the layer below it hands over.",
        "Which layer makes those entries? And does it compress what comes in, or what goes out?",
        (
            Mistake(
                lambda: last_kv_source(_config()),
                "That layer makes the entries, from its input. Who gave it that input?",
            ),
            Mistake(
                lambda: _config().num_hidden_layers - 1,
                "If it were the last layer, every prompt token would have to run through all of them.",
            ),
        ),
    ),
    Exercise(
        "06.2",
        f"A prompt has {PROMPT:,} tokens and the tail is one window. Count the rows of all layers together: for how "
        "many pairs of a token and a layer does V4.1-Flash run attention and experts?",
        "rows",
        lambda: _rows(PROMPT, _config().sliding_window),
        "Half of the layers see every token, the other half a window of them.",
        "Two halves of 20 layers. How many tokens go through each?",
        (
            Mistake(lambda: _rows(PROMPT, PROMPT), "That runs every token through every layer."),
            Mistake(lambda: _rows(PROMPT, 0), "The tail is missing: the decoder's windows need it."),
            Mistake(
                lambda: _rows(PROMPT, 1),
                "One row would give the last prediction something to start from. The tail is longer.",
            ),
            Mistake(
                lambda: _rows(PROMPT, _exact(_layers()[1] - 1)),
                "That is the tail that makes everything exact. The question asks for a tail of one window.",
            ),
        ),
    ),
    Exercise(
        "06.3",
        f"The same for a prompt of {SHORT} tokens.",
        "rows",
        lambda: _rows(SHORT, min(SHORT, _config().sliding_window)),
        "A prompt shorter than the tail is all tail.",
        "How many of these tokens are in the tail?",
        (
            Mistake(
                lambda: _rows(SHORT, _config().sliding_window),
                "A tail cannot have more tokens than the prompt.",
            ),
            Mistake(lambda: _rows(SHORT, 0), "The decoder half runs as well: for which of these tokens?"),
        ),
    ),
    Exercise(
        "06.4",
        "A model like V4.1-Flash (window 128) has only 10 layers after the first one of its decoder half. How many "
        "rows of tail make its last prediction exact?",
        "rows",
        lambda: _exact(10),
        "The first window is whole, and each further layer adds 127 rows.",
        "The last row needs a whole window of the layer below. Windows overlap: what does one layer more add?",
        (
            Mistake(
                lambda: 10 * _config().sliding_window,
                "Each layer more adds a window less the row that is there already.",
            ),
            Mistake(
                lambda: _config().sliding_window,
                "That is enough for one layer. Its rows have windows too, in the layer below.",
            ),
            Mistake(lambda: _exact(11), "One layer too many: the first window is counted already."),
            Mistake(lambda: _exact(_layers()[1] - 1), "That is for V4.1-Flash itself. This model has fewer layers."),
        ),
    ),
    Exercise(
        "06.5",
        "After a prefill with a tail of one window, which component of the cache may differ from that of a full run: "
        "`'main_kv'`, `'index_key'`, `'compressor_state'` or `'window_kv'`?",
        "a name in quotes",
        lambda: "window_kv",
        "The others are made before the tail begins to matter.",
        "Three of them are made from what every token has. Which one do the decoder's layers make for themselves?",
        (
            Mistake(
                lambda: "main_kv",
                "Entries are made in the encoder and from its output, for every token. What do layers 21 to 39 keep?",
            ),
            Mistake(
                lambda: "index_key",
                "Index keys are made beside the entries, for every token. What do layers 21 to 39 keep?",
            ),
            Mistake(
                lambda: "compressor_state",
                "That is half an entry, waiting in a layer of the encoder half, where every token runs.",
            ),
        ),
    ),
)
