"""Models that several test files share: built once, with random weights, in float64 so that paths compare exactly."""

import pytest
import torch

from flashsim.config import load_config
from model.random_weights import randomise
from model.transformer import Transformer


def random_model(config="tiny", dtype=torch.float64, **options):
    """A model of a preset or a config with random weights and a folded token map."""
    config = load_config(config)
    model = randomise(Transformer(config, dtype=dtype, **options))
    if config.engram_layer_ids:
        model.set_token_map([i % config.engram_compressed_vocab_size for i in range(config.vocab_size)])
    return model


@pytest.fixture(scope="session")
def make_model():
    return random_model


@pytest.fixture(scope="session")
def tiny():
    return random_model()


@pytest.fixture(scope="session")
def ids():
    """[2, 300] token ids of the tiny vocabulary."""
    return torch.randint(0, 320, (2, 300), generator=torch.Generator().manual_seed(7))
