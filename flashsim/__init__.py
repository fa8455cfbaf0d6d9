"""KV-cache bytes and decode FLOPs of every DeepSeek generation, from 389,120 bytes a token to 890.

    >>> import flashsim
    >>> config = flashsim.load_config("v4.1-flash")
    >>> flashsim.kv_bytes_per_token(config)
    890
    >>> print(flashsim.kv_cache(config, "1M").total())
    892703360

Standard library only. `flashsim.figures` needs matplotlib and `Report.to_pandas` pandas; both are imported when used.
"""

from flashsim.budget import Constraints, Fleet, capacity, compare, search, variant
from flashsim.claims import Claim, check_claims
from flashsim.config import PRESETS, Config, load_config
from flashsim.flops import WEIGHTS, crossing, decode_flops, prefill_flops, prefill_flops_per_token
from flashsim.formats import BlockFormat, Layout, LayoutError, Record
from flashsim.kv_cache import ParallelError, kv_bytes_per_token, kv_cache, kv_reserved, token_history_bytes
from flashsim.ladder import ladder
from flashsim.params import parameters
from flashsim.persistent import persistent_cache
from flashsim.reading import ConfigError
from flashsim.report import Report
from flashsim.schedule import LayerPlan, layer_plan
from flashsim.traffic import decode_read, decode_write
from flashsim.units import ContextError, parse_context

__all__ = [
    "PRESETS",
    "WEIGHTS",
    "BlockFormat",
    "Claim",
    "Config",
    "ConfigError",
    "Constraints",
    "ContextError",
    "Fleet",
    "LayerPlan",
    "Layout",
    "LayoutError",
    "ParallelError",
    "Record",
    "Report",
    "capacity",
    "check_claims",
    "compare",
    "crossing",
    "decode_flops",
    "decode_read",
    "decode_write",
    "kv_bytes_per_token",
    "kv_cache",
    "kv_reserved",
    "ladder",
    "layer_plan",
    "load_config",
    "parameters",
    "parse_context",
    "persistent_cache",
    "prefill_flops",
    "prefill_flops_per_token",
    "search",
    "token_history_bytes",
    "variant",
]

__version__ = "0.1.0"
