"""The PyTorch model: one idea per file, shapes from `flashsim.config`, layer roles from `flashsim.schedule`.

import model
lm = model.load("tiny")                        # random weights; "ladder-v1" to "ladder-v4.1"; or a checkpoint's folder
logits = lm(ids)                               # [batch, sequence] -> [batch, sequence, vocab], float32
cache = lm.new_cache(); lm(ids, cache=cache)   # continues a sequence
"""

from model.loading import load, random_model
from model.saving import save
from model.transformer import Transformer

__all__ = ["Transformer", "load", "random_model", "save"]
