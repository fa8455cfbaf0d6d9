"""V1 to V3.2: embedding, layers with one residual stream and a norm before each half, head.

    h = embed(id)
    for each layer:   h = h + attention(RMS(h));   h = h + feed_forward(RMS(h))
    logits = RMS(h) head^T                                                            float32

| class | generation | attention | feed-forward |
| --- | --- | --- | --- |
| `GQATransformer` | V1 | `attention/gqa.py` | dense |
| `MLATransformer` | V2, V2-Lite, V3 | `attention/mla.py` | dense below `first_k_dense_replace`, then experts |
| `DSATransformer` | V3.2 | `attention/dsa.py` | the same |

A full forward is a step into a fresh cache, a decode step is a call with one token. Parameter names are the released
tensor names (`model.layers.0.self_attn...`). Source: earlier generations, 2, 3, 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashsim.config import Config, DSAConfig, GQAConfig, MLAConfig, load_config
from flashsim.formats import LayoutError
from flashsim.kv_cache import index_record, main_record
from flashsim.reading import ConfigError
from flashsim.schedule import LayerPlan, layer_plan
from model.attention import dsa, gqa, mla
from model.backend import BackendError, make_backend
from model.call import InputError, WholePrompt, begin
from model.flop_counter import label
from model.grouped_experts import MoE, SwiGLU, check_router
from model.layers import Embedding, Linear, RMSNorm, arithmetic_dtype, keep_small_copies, wide, wide_dtype
from model.token_cache import TokenCache, TokenStep
from model.yarn import frequencies, scaling_of

ATTENTIONS = {"gqa": gqa.Attention, "mla": mla.Attention, "dsa": dsa.Attention}
FORMS = ("naive", "absorbed")


class Layer(nn.Module):
    """`input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`."""

    def __init__(self, config: Config, plan: LayerPlan, *, dtype, device):
        super().__init__()
        options = {"dtype": dtype, "device": device}
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.self_attn = ATTENTIONS[plan.attention](config, plan, **options)
        if plan.feed_forward == "moe":
            self.mlp = MoE(config, **options)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, **options)

    def forward(self, h: Tensor, step: TokenStep, cache: TokenCache) -> Tensor:
        """The stream [B, S, D] after the layer."""
        h = h + self.self_attn(self.input_layernorm(h), step, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Stack(nn.Module):
    """`embed_tokens`, `layers`, `norm`."""

    def __init__(self, config: Config, plans: Sequence[LayerPlan], *, dtype, device):
        super().__init__()
        options = {"dtype": dtype, "device": device}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nn.ModuleList(Layer(config, plan, **options) for plan in plans)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)


class PreNormTransformer(WholePrompt):
    """What the three have in common, with uninitialised weights.

    Args:
        config: of the class's family, or what `flashsim.load_config` takes.
        backend: `reference`; these generations have no kernels.
        dtype: of weights and activations; float32, bfloat16, or float64 for exact comparisons. A float32 model on a CPU
            computes in float64 (`model.layers`).
        device: `meta` allocates nothing.
        cache_rounding: the FP8 rounding of what V3.2 caches, which is part of the trained model. BF16 records of V1 to
            V3 round nothing (`model.record_codec`).

    Raises:
        ConfigError: another family, or a field that this model does not compute.
        BackendError: another backend.
    """

    family: type[Config]

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
        if type(config) is not self.family:
            raise ConfigError("model_type", config.model_type, ", ".join(self.family.model_types))
        if backend != "reference":
            raise BackendError(f"backend is {backend!r}; accepted: reference, as the kernels are those of V4.1")
        self._check(config, cache_rounding)
        self.config, self.backend = config, make_backend(backend)
        self.dtype, self.cache_rounding = dtype, cache_rounding
        self.plans = layer_plan(config)
        options = {"dtype": dtype, "device": device}
        self.model = Stack(config, self.plans, **options)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, widened=True, **options)
        keep_small_copies(self)

    @classmethod
    def _check(cls, config: Config, cache_rounding: bool) -> None:
        """Refuse what the model would compute wrongly."""

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.model.embed_tokens.weight.device

    def new_cache(self, batch_size: int = 1, *, capacity: int = 0) -> TokenCache:
        """An empty cache for this model. `capacity` makes room for so many tokens at once."""
        options = {"dtype": self.dtype, "device": self.device, "cache_rounding": self.cache_rounding}
        return TokenCache(self.config, batch_size, capacity=capacity, **options)

    def forward(
        self,
        ids: Tensor,
        cache: TokenCache | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last: bool = False,
        form: str | None = None,
    ) -> Tensor:
        """Logits [B, S, vocab] of token ids [B, S]. Continues `cache` where one is given.

        Args:
            ids: whole numbers, each sequence's new tokens, padded at the end where sequences differ.
            cache: what came before, and where these tokens go.
            lengths: how many of the S tokens are real, for each sequence; rows beyond give logits of no meaning.
            last: only the logits of each sequence's last real token, [B, vocab].
            form: of latent attention, `naive` or `absorbed`; None takes absorbed for single tokens, naive for more.

        Raises:
            InputError: ids of another shape, type or range; too many tokens; another form.
            CacheError: a cache of another model.
        """
        if form is not None and (form not in FORMS or self.family is GQAConfig):
            accepted = "None" if self.family is GQAConfig else f"{', '.join(FORMS)} or None"
            raise InputError(f"form is {form!r}; accepted: {accepted}")
        cache, count, ids = begin(self, ids, cache, lengths)
        form = form or ("absorbed" if max(count) == 1 else "naive")
        step = TokenStep(self.config, list(cache.lengths), count, self.device, form)
        with torch.inference_mode():
            cache.begin(step)
            h = self.model.embed_tokens(ids).to(arithmetic_dtype(self.dtype, self.device))
            for layer in self.model.layers:
                h = layer(h, step, cache)
            cache.advance(step)
            logits = self._logits(h, step, last)
        return logits.clone()  # an ordinary tensor again

    def _logits(self, h: Tensor, step: TokenStep, last: bool) -> Tensor:
        if last:
            row = torch.tensor([count - 1 for count in step.count], device=self.device)
            h = h[torch.arange(step.batch, device=self.device), row]
        x = self.model.norm(h)
        if not self.config.tie_word_embeddings:
            return self.lm_head(x).to(wide_dtype(self.dtype))
        x = wide(x)
        with label("lm_head"):
            return F.linear(x, self.model.embed_tokens.weight.to(x.dtype)).to(wide_dtype(self.dtype))


class GQATransformer(PreNormTransformer):
    """V1: grouped-query attention and dense feed-forwards, `model_type` llama."""

    family = GQAConfig

    @classmethod
    def _check(cls, config: GQAConfig, cache_rounding: bool) -> None:
        if config.model_type != "llama":
            raise ConfigError("model_type", config.model_type, "llama")
        for field in ("attention_bias", "mlp_bias"):
            if getattr(config, field):
                raise ConfigError(field, True, "false: V1 has no biases")
        if any(plan.window is not None for plan in layer_plan(config)):
            raise ConfigError("sliding_window", config.sliding_window, "none: V1 attends to everything")
        if config.head_dim % 2:
            raise ConfigError("head_dim", config.head_dim, "an even number of channels")
        if scaling_of(config) is not None:
            raise ConfigError("rope_scaling", dict(config.rope_scaling), "none: V1 has no RoPE scaling")


class MLATransformer(PreNormTransformer):
    """V2, V2-Lite and V3: latent attention and experts, `model_type` deepseek_v2 or deepseek_v3."""

    family = MLAConfig

    @classmethod
    def _check(cls, config: MLAConfig, cache_rounding: bool) -> None:
        frequencies(config, config.qk_rope_head_dim)  # names what rope_scaling lacks
        if any(plan.feed_forward == "moe" for plan in layer_plan(config)):
            check_router(config)


class DSATransformer(MLATransformer):
    """V3.2: latent attention over the tokens that an indexer picks, `model_type` deepseek_v32."""

    family = DSAConfig

    @classmethod
    def _check(cls, config: DSAConfig, cache_rounding: bool) -> None:
        super()._check(config, cache_rounding)
        width, rotary = config.index_head_dim, config.qk_rope_head_dim
        if width < rotary:
            raise ConfigError("index_head_dim", width, f"a width of at least qk_rope_head_dim, {rotary}")
        if not cache_rounding:
            return
        if width & (width - 1):
            raise ConfigError(
                "index_head_dim", width, "a power of two, for the Hadamard rotation, or no cache rounding"
            )
        for field, record in (("kv_lora_rank", main_record), ("index_head_dim", index_record)):
            try:
                record(config).nbytes  # noqa: B018
            except LayoutError as error:
                accepted = f"what its records can hold ({error})"
                raise ConfigError(field, getattr(config, field), accepted) from None
