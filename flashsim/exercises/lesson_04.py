"""Lesson 04, compressed attention: CSA, HCA and the window."""

from fractions import Fraction

from flashsim.config import load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.kv_cache import kv_bytes_per_token, kv_cache
from flashsim.pictures.compressed import feeds, reach
from flashsim.schedule import layer_plan
from flashsim.traffic import decode_read

CSA, HCA = 4, 128  # compress_ratio
TOKEN, TOKENS, ENTRY = 10, 32, 5
POSITION = 99_999
CONTEXT = 10**6


def _per_token(component: str) -> int | Fraction:
    return kv_cache("v4-pro", CONTEXT).where(component=component, tier="global").per_token_bytes()


def _entry_bytes() -> int:
    return kv_cache("v4-pro", CONTEXT).where(component="main_kv").rows[0].bytes_per_record


def _layers(attention: str) -> int:
    return sum(plan.attention == attention for plan in layer_plan(load_config("v4-pro")))


def _entries_of(token: int, *, overlap: bool) -> list[int]:
    return sorted({feed.entry for feed in feeds(TOKENS, CSA, overlap=overlap) if feed.token == token})


def _first_query(entry: int, ratio: int) -> int:
    """The lowest position that sees an entry."""
    return next(p for p in range(10**4) if entry < reach(p, window=1, ratio=ratio).visible)


def _vectors(position: int, ratio: int) -> int:
    return reach(position, window=load_config("v4-flash").sliding_window, ratio=ratio).vectors


def _csa_layer() -> dict[str, int]:
    """Bytes that a step reads in one CSA layer."""
    config = load_config("v4-flash")
    layer = next(plan.layer for plan in layer_plan(config) if plan.attention == "csa")
    return decode_read(config, CONTEXT).where(layer=layer).by("component")


def _csa_entries() -> int:
    return kv_cache("v4-flash", CONTEXT).where(component="main_kv", layer=2).total()


def _without_indexer(times: int = 1) -> Fraction:
    read = _csa_layer()
    return Fraction(read["window_kv"] + times * _csa_entries(), sum(read.values()))


EXERCISES = (
    Exercise(
        "04.1",
        f"V4-Pro has {_layers('csa')} CSA layers and {_layers('hca')} HCA layers; its records are those of V4-Flash. "
        "How many bytes does a token add to its global cache, on average?",
        "bytes",
        lambda: kv_bytes_per_token(load_config("v4-pro")),
        "A quarter of an entry and of an index key in each CSA layer, a 128th of an entry in each HCA layer.",
        "For each kind of layer: bytes of its records, divided by the tokens that share one, times the layers.",
        (
            Mistake(
                lambda: _per_token("main_kv"), "The indexer of a CSA layer keeps keys as well, one for each entry."
            ),
            Mistake(
                lambda: kv_bytes_per_token(load_config("v4-pro")) + 61 * _entry_bytes(),
                "The window does not grow: a new record takes the place of the oldest.",
            ),
            Mistake(
                lambda: (
                    kv_cache("v4-pro", CONTEXT).where(component="index_key").per_token_bytes()
                    + _layers("csa") * Fraction(_entry_bytes(), CSA)
                ),
                "The HCA layers are missing. They add little, but not nothing.",
            ),
            Mistake(
                lambda: (
                    _layers("csa") * Fraction(_entry_bytes(), HCA)
                    + _layers("hca") * Fraction(_entry_bytes(), CSA)
                    + _per_token("index_key")
                ),
                "CSA has one entry for 4 tokens, HCA one for 128; you have them the other way round.",
            ),
        ),
        tolerance=0.0001,
    ),
    Exercise(
        "04.2",
        f"Someone changes token {TOKEN} of {TOKENS} and nothing else. Which entries of a CSA layer's compressor come "
        "out different? (Its input is changed at this token alone.)",
        "list of entries",
        lambda: _entries_of(TOKEN, overlap=True),
        "A token has a part in the entry of its own group, and with its other half in the next one.",
        "Find the token's own group first. Then ask for whom the first half of its channels is meant.",
        (
            Mistake(
                lambda: _entries_of(TOKEN, overlap=False),
                "That is the entry of its own group. But the groups of CSA overlap.",
            ),
            Mistake(
                lambda: [entry - 1 for entry in _entries_of(TOKEN, overlap=True)],
                "The overlap goes the other way: an entry looks back, at the group before its own.",
            ),
        ),
    ),
    Exercise(
        "04.3",
        f"Which is the first position whose query sees entry {ENTRY} of a CSA layer? Both count from 0.",
        "position",
        lambda: _first_query(ENTRY, CSA),
        "The entry is made when the last token of its group is there, and that token itself sees it.",
        "Which tokens are the entry's own, and which of them comes last?",
        (
            Mistake(lambda: _first_query(ENTRY, CSA) + 1, "One late: the token that completes a group sees the entry."),
            Mistake(lambda: ENTRY * CSA, "That is the first token of its group. The entry cannot know the others yet."),
            Mistake(lambda: _first_query(ENTRY - 1, CSA), "That is the entry before. Entries count from 0."),
        ),
    ),
    Exercise(
        "04.4",
        f"In an HCA layer of V4-Flash, how many vectors does the query at position {POSITION:,} attend to, window and "
        "entries together? (The sink is not a vector.)",
        "vectors",
        lambda: _vectors(POSITION, HCA),
        "128 records of the window, and every entry that is complete: 100,000 tokens make 781 of them.",
        "The window is full. How many groups of 128 tokens are complete up to and with this position?",
        (
            Mistake(
                lambda: (POSITION + 1) // HCA,
                "Those are the entries. The window is in the same softmax.",
            ),
            Mistake(
                lambda: _vectors(POSITION, HCA) + 1,
                "One too many: a group that is not complete has no entry, and position p is the token number p + 1.",
            ),
            Mistake(
                lambda: load_config("v4-flash").sliding_window + load_config("v4-flash").index_topk,
                "That is a CSA layer, which selects. HCA has no indexer and reads every entry.",
            ),
            Mistake(lambda: _vectors(POSITION, CSA), "An entry of HCA stands for 128 tokens, not for 4."),
        ),
    ),
    Exercise(
        "04.5",
        f"At {CONTEXT:,} tokens, how many times more bytes would a step read in one CSA layer of V4-Flash if it "
        "attended to every entry and had no indexer? Two digits are enough.",
        "times",
        _without_indexer,
        "146 MB of entries, instead of 17 MB of index keys and the 512 entries that they find.",
        "Add up what is read in both cases, the window included. With an indexer, it is not only the chosen entries.",
        (
            Mistake(
                lambda: Fraction(
                    _csa_layer()["window_kv"] + _csa_entries(), _csa_layer()["window_kv"] + _csa_layer()["main_kv"]
                ),
                "To choose, the indexer reads all of its keys, one for each entry. Count them.",
            ),
            Mistake(
                lambda: _without_indexer(CSA),
                "There are not so many entries: one for 4 tokens.",
            ),
            Mistake(lambda: 1 / _without_indexer(), "That is the share that is left. Turn the fraction over."),
        ),
        tolerance=0.02,
    ),
)
