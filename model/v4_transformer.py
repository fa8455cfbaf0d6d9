"""DeepSeek-V4, Flash and Pro: embedding, layers between hyper-connections, head.

    h = K copies of embed(id)
    for each layer, for attention and then for the experts:
        mix = coefficients of h                             the site's own, unlike V4.1, which shifts `pre` by a site
        y = sublayer(norm(collapse(h, mix.pre)));  h = expand(h, y, mix)
    logits = norm(collapse(h, pre of hc_head)) head^T       float32

| ratio of a layer | attention |
| --- | --- |
| 0 | `WindowAttention` |
| `compress_rate_csa` (4) | `CompressedSparseAttention` |
| any other (128) | `HeavilyCompressedAttention` |

A full forward is a prefill into a fresh cache; a decode step is a call with one token. Parameter names are the released
tensor names. Source: earlier generations, 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import V4Config, load_config
from flashsim.formats import LayoutError
from flashsim.kv_cache import index_record, main_record
from flashsim.reading import ConfigError
from flashsim.schedule import LayerPlan, layer_plan
from model.attention.csa import CompressedSparseAttention
from model.attention.hca import HeavilyCompressedAttention
from model.attention.window import WindowAttention
from model.backend import BackendError, make_backend
from model.cache import ROLLBACK
from model.call import WholePrompt, begin
from model.flop_counter import label
from model.hyper_connection import coefficients, collapse, expand
from model.layers import Embedding, Linear, RMSNorm, arithmetic_dtype, keep_small_copies, wide, wide_dtype
from model.rope import frequencies
from model.step import Step
from model.v4_cache import V4Cache
from model.v4_moe import V4MoE

ATTENTION = {"window": WindowAttention, "csa": CompressedSparseAttention, "hca": HeavilyCompressedAttention}


class V4Block(nn.Module):
    """One layer: `attn_norm`, `attn`, `ffn_norm`, `ffn`, and the coefficients `hc_attn_*`, `hc_ffn_*`."""

    def __init__(self, config: V4Config, plan: LayerPlan, *, dtype, device):
        super().__init__()
        self.config, self.plan = config, plan
        options = {"dtype": dtype, "device": device}
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.attn = ATTENTION[plan.attention](config, plan, **options)
        self.ffn = V4MoE(config, plan, **options)
        mixes = (2 + config.hc_mult) * config.hc_mult
        for site in ("attn", "ffn"):
            _add_mixing(self, f"hc_{site}", mixes, 3, config, **options)

    def forward(self, h: Tensor, ids: Tensor, step: Step, cache: V4Cache) -> Tensor:
        """[B, S, K, D] streams after the layer."""
        mix = self._mix("attn", h)
        h = expand(h, self.attn(self.attn_norm(collapse(h, mix.pre)), step, cache), mix)
        mix = self._mix("ffn", h)
        return expand(h, self.ffn(self.ffn_norm(collapse(h, mix.pre)), ids), mix)

    def _mix(self, site: str, h: Tensor):
        fn, scale, base = (getattr(self, f"hc_{site}_{name}") for name in ("fn", "scale", "base"))
        config = self.config
        return coefficients(
            h, fn, scale, base, norm_eps=config.rms_norm_eps, iterations=config.hc_sinkhorn_iters, eps=config.hc_eps
        )


class V4Transformer(WholePrompt):
    """The text model of a V4 config, with uninitialised weights.

    Args:
        config: a `V4Config`, or what `flashsim.load_config` takes.
        backend: `reference`; the kernels are those of V4.1.
        dtype: of weights and activations; float32, bfloat16, or float64 for exact comparisons.
        device: `meta` allocates nothing.
        cache_rounding: the FP8 and FP4 rounding of what is cached, which is part of the trained model.

    Raises:
        ConfigError: another family, or a field that this model does not compute.
    """

    def __init__(
        self,
        config,
        backend: str = "reference",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cache_rounding: bool = True,
    ):
        super().__init__()
        config = load_config(config)
        _check(config, cache_rounding)
        if backend != "reference":
            raise BackendError(f"backend is {backend!r}; accepted: reference, as the kernels are those of V4.1")
        self.config, self.backend = config, make_backend(backend)
        self.dtype, self.cache_rounding = dtype, cache_rounding
        options = {"dtype": dtype, "device": device}
        self.plans = layer_plan(config)
        self.embed = Embedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nn.ModuleList(V4Block(config, plan, **options) for plan in self.plans)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        if not config.tie_word_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, widened=True, **options)
        _add_mixing(self, "hc_head", config.hc_mult, 1, config, **options)
        keep_small_copies(self)

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embed.weight.device

    def new_cache(self, batch_size: int = 1, *, capacity: int = 0, rollback: int = ROLLBACK) -> V4Cache:
        """An empty cache for this model. `capacity` makes room for so many tokens at once."""
        return V4Cache(
            self.config,
            batch_size,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            cache_rounding=self.cache_rounding,
            rollback=rollback,
        )

    def forward(
        self,
        ids: Tensor,
        cache: V4Cache | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits [B, S, vocab] of token ids [B, S]. Continues `cache` where one is given.

        Args:
            ids: whole numbers, each sequence's new tokens, padded at the end where sequences differ.
            cache: what came before, and where these tokens go.
            lengths: how many of the S tokens are real, for each sequence; rows beyond give logits of no meaning.
            last: only the logits of each sequence's last real token, [B, vocab].

        Raises:
            InputError: ids of another shape, type or range; too many tokens.
        """
        cache, count, ids = begin(self, ids, cache, lengths)
        step = Step(self.config, list(cache.lengths), count, self.device)
        with torch.inference_mode():
            cache.begin(step)
            e = self.embed(ids).to(arithmetic_dtype(self.dtype, self.device))
            h = e.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)
            for layer in self.layers:
                h = layer(h, ids, step, cache)
            cache.advance(step)
            if last:
                h = h[torch.arange(step.batch, device=self.device), torch.tensor(count, device=self.device) - 1]
            x = wide(self.norm(collapse(h, self._head_mix(h))))
            if self.config.tie_word_embeddings:
                with label("lm_head"):
                    logits = F.linear(x, self.embed.weight.to(x.dtype))
            else:
                logits = self.head(x)
        return logits.to(wide_dtype(self.dtype)).clone()  # an ordinary tensor again

    def _head_mix(self, h: Tensor) -> Tensor:
        """[..., K] coefficients that collapse the streams before the head."""
        f, config = wide(h).flatten(-2), self.config
        with label("hyper_connection"):
            z = F.linear(f, self.hc_head_fn.to(f.dtype))
        z = z * torch.rsqrt(f.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)
        return torch.sigmoid(z * self.hc_head_scale.to(z.dtype) + self.hc_head_base.to(z.dtype)) + config.hc_eps


def _add_mixing(module: nn.Module, name: str, rows: int, scales: int, config: V4Config, *, dtype, device) -> None:
    """Parameters `name`_fn, _base, _scale of a hyper-connection, float32."""
    shapes = {"fn": (rows, config.hc_mult * config.hidden_size), "base": (rows,), "scale": (scales,)}
    for part, shape in shapes.items():
        value = torch.empty(shape, dtype=wide_dtype(dtype), device=device)
        module.register_parameter(f"{name}_{part}", nn.Parameter(value, requires_grad=False))


def _check(config, cache_rounding: bool) -> None:
    if not isinstance(config, V4Config):
        raise ConfigError("model_type", config.model_type, ", ".join(V4Config.model_types))
    config.needs("routed_scaling_factor", "norm_topk_prob")
    for field, accepted in (("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if getattr(config, field) != accepted:
            raise ConfigError(field, getattr(config, field), repr(accepted))
    width, rope = config.index_head_dim, config.qk_rope_head_dim
    if width < rope:
        raise ConfigError("index_head_dim", width, f"a width of at least qk_rope_head_dim, {rope}")
    frequencies(config, True)  # names what rope_scaling lacks
    if not cache_rounding:
        return
    for field, record in (("head_dim", main_record), ("index_head_dim", index_record)):
        try:
            record(config).nbytes  # noqa: B018
        except LayoutError as error:
            raise ConfigError(field, getattr(config, field), f"what its records can hold ({error})") from None
    if width & (width - 1):
        raise ConfigError("index_head_dim", width, "a power of two, for the Hadamard rotation before rounding")
