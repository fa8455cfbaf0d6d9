"""Lesson 12, mixture of experts."""

from fractions import Fraction

from flashsim.config import V41Config, load_config
from flashsim.exercises import Exercise, Mistake
from flashsim.formats import MXFP4, BlockFormat
from flashsim.params import active_share, parameters
from flashsim.pictures.moe import experts_touched, route

SCORES, BIAS, PICKS, SCALE = (0.9, 0.4, 0.8, 0.6), (-0.4, 0.3, 0.0, 0.05), 2, 1.5
BATCH = 32


def _release() -> V41Config:
    return load_config("v4.1-flash")


def _expert_bytes(form: BlockFormat = MXFP4) -> int:
    config = _release()
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return 2 * inner * form.nbytes(hidden) + hidden * form.nbytes(inner)


def _expert() -> int:
    return 3 * _release().hidden_size * _release().moe_intermediate_size


def _weight(expert: int, scores=SCORES, bias=BIAS, scale: float = SCALE) -> float:
    chosen = route(scores, bias, PICKS, scale)
    return chosen.weights[chosen.experts.index(expert)]


def _layer_parameters(name: str) -> int:
    return parameters(_release()).by("component", "layer")[name, 0]


EXERCISES = (
    Exercise(
        "12.1",
        f"Four experts have scores {list(SCORES)} and biases {list(BIAS)}. Which {PICKS} are chosen? Give a list "
        "of expert "
        "numbers, from 0 on, from low to high.",
        "list of experts",
        lambda: list(route(SCORES, BIAS, PICKS).experts),
        "Sums 0.5, 0.7, 0.8, 0.65: the bias moved expert 1 past expert 0.",
        "Add score and bias of each expert, and take the largest sums.",
        (
            Mistake(
                lambda: list(route(SCORES, BIAS, PICKS).experts)[::-1],
                "The right ones, the other way round. Give them from low to high.",
            ),
            Mistake(
                lambda: list(route(SCORES, [0] * len(SCORES), PICKS).experts),
                "Those have the best scores. The bias takes part in the choice.",
            ),
            Mistake(
                lambda: list(route(BIAS, [0] * len(BIAS), PICKS).experts),
                "Those have the largest biases. Add them to the scores.",
            ),
        ),
    ),
    Exercise(
        "12.2",
        f"And with which weight does expert 2 count, with routed_scaling_factor {SCALE}?",
        "number",
        lambda: _weight(2),
        "0.8 of the 1.2 that both scores make together, times 1.5.",
        "The scores of the chosen ones are divided by their sum, then multiplied with the scaling factor.",
        (
            Mistake(lambda: _weight(2, scale=1.0), "routed_scaling_factor is missing."),
            Mistake(
                lambda: SCALE * (SCORES[2] + BIAS[2]) / (SCORES[1] + BIAS[1] + SCORES[2] + BIAS[2]),
                "The bias chooses, it does not weigh: weights come from the plain scores.",
            ),
            Mistake(
                lambda: SCALE * SCORES[2] / sum(SCORES),
                "The scores of the chosen experts are divided by their own sum, not by that of all.",
            ),
            Mistake(lambda: SCALE * SCORES[2], "Scores are divided by the sum of the chosen ones first."),
        ),
        tolerance=1e-3,
    ),
    Exercise(
        "12.3",
        "How many bytes does one routed expert of V4.1-Flash take, packed: FP4 with a scale of one byte for "
        "every 32 numbers? "
        "(hidden_size 5,120, moe_intermediate_size 2,304.)",
        "bytes",
        _expert_bytes,
        "Three matrices of 11,796,480 numbers, each number half a byte and a 32nd of a scale.",
        "An expert has three matrices: gate, up and down. A block of 32 numbers takes 16 bytes and a scale.",
        (
            Mistake(lambda: _expert() // 2, "Half a byte a number, and every 32 of them have a scale as well."),
            Mistake(
                lambda: _expert_bytes() * 2 // 3,
                "SwiGLU has three matrices: gate and up in, down out.",
            ),
            Mistake(_expert, "That is the number of numbers. Each takes four bits, and blocks have scales."),
            Mistake(lambda: 2 * _expert(), "That would be BF16."),
        ),
    ),
    Exercise(
        "12.4",
        "How many expert parameters of one layer of V4.1-Flash does a token multiply with, shared expert "
        "included? (Leave the "
        "router out.)",
        "parameters",
        lambda: (
            active_share(_release(), "routed_experts", _layer_parameters("routed_experts"))
            + _layer_parameters("shared_experts")
        ),
        "Six routed experts and the shared one: seven of 385.",
        "How many experts run for a token, and how many numbers are in one?",
        (
            Mistake(
                lambda: active_share(_release(), "routed_experts", _layer_parameters("routed_experts")),
                "One expert runs for every token and is not chosen by the router.",
            ),
            Mistake(
                lambda: _layer_parameters("routed_experts") + _layer_parameters("shared_experts"),
                "Those are all experts of the layer. A token runs through a few.",
            ),
            Mistake(
                lambda: 7 * 2 * _release().hidden_size * _release().moe_intermediate_size,
                "SwiGLU has three matrices: gate and up in, down out.",
            ),
        ),
    ),
    Exercise(
        "12.5",
        f"{BATCH} requests decode together, each token picks 6 of 384 experts at random. How many different "
        "experts of a layer "
        "are read, on average? Round to a whole number.",
        "experts",
        lambda: round(experts_touched(_release().n_routed_experts, _release().num_experts_per_tok, BATCH)),
        "E (1 - (1 - k/E)^B): an expert is spared by one token with 378/384, by all 32 with that to the power of 32.",
        "With what probability does one token leave a given expert out? And all of them?",
        (
            Mistake(
                lambda: BATCH * _release().num_experts_per_tok,
                "Some tokens pick the same expert. It is read once.",
            ),
            Mistake(
                lambda: _release().num_experts_per_tok,
                "That is one token. Others pick other experts.",
            ),
            Mistake(lambda: _release().n_routed_experts, "Not yet all: some are spared by every token."),
            Mistake(
                lambda: round(Fraction(_release().n_routed_experts) - experts_touched(384, 6, BATCH)),
                "That many are left out.",
            ),
        ),
        tolerance=0.005,
    ),
)
