"""DeepSeek-V4.1, the text model: embedding, layers between hyper-connections, head. All forwards are one path.

    h = K copies of embed(id);  pre = (1, 0, ...)
    for each layer:
        h += engram                                         where the layer has one
        y = attention(norm(collapse(h, pre)));   h = expand(h, y, mix_attn);   pre = mix_attn.pre
        y = moe(norm(collapse(h, pre)));         h = expand(h, y, mix_ffn);    pre = mix_ffn.pre
    logits = norm(collapse(h, pre)) head^T                  float32

A full forward is a prefill into a fresh cache; a decode step is a call with one token. `prefill` is the causal
encoder-decoder: the layer of the last KV source compresses every row, and from its attention on only the last rows of
the prompt go on. Parameter names are the released tensor names. Source: V4.1 architecture 0.4, 2, 4.5, 13.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashsim.config import V41Config, load_config
from flashsim.formats import LayoutError
from flashsim.kv_cache import index_record, main_record, window_record
from flashsim.persistent import tail_rows
from flashsim.reading import ConfigError
from flashsim.schedule import LayerPlan, last_kv_source, layer_plan
from model.attention.csa2 import Attention
from model.backend import Backend, make_backend
from model.cache import ROLLBACK, Cache
from model.call import EXACT, InputError, LanguageModel, begin
from model.differentiable import DifferentiableCache
from model.engram import Engram
from model.explain import Explanation, explain
from model.layers import Embedding, Linear, RMSNorm, keep_small_copies, wide_dtype
from model.memory import MODEST, require
from model.moe import MoE
from model.replay import Replay, replay
from model.rope import frequencies
from model.step import Step


class Block(nn.Module):
    """One layer: `attn_norm`, `attn`, `ffn_norm`, `ffn`, the coefficients `hc_attn_*`, `hc_ffn_*`, maybe `engram`."""

    def __init__(self, config: V41Config, plan: LayerPlan, backend: Backend, *, dtype, device):
        super().__init__()
        self.config, self.plan, self.backend = config, plan, backend
        options = {"dtype": dtype, "device": device}
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.attn = Attention(config, plan, backend, **options)
        self.ffn = MoE(config, backend, **options)
        streams = config.hc_mult
        mixes = (2 + streams) * streams
        shapes = {"fn": (mixes, streams * config.hidden_size), "base": (mixes,), "scale": (3,)}
        for site in ("attn", "ffn"):
            for name, shape in shapes.items():
                value = torch.empty(shape, dtype=wide_dtype(dtype), device=device)
                self.register_parameter(f"hc_{site}_{name}", nn.Parameter(value, requires_grad=False))
        if plan.engram is not None:
            self.engram = Engram(config, plan.layer, backend, **options)

    def mix(self, site: str, h: Tensor):
        """The hyper-connection coefficients of site `attn` or `ffn` for streams h."""
        fn, scale, base = (getattr(self, f"hc_{site}_{name}") for name in ("fn", "scale", "base"))
        config = self.config
        return self.backend.coefficients(
            h, fn, scale, base, norm_eps=config.rms_norm_eps, iterations=config.hc_sinkhorn_iters, eps=config.hc_eps
        )

    def enter(
        self, h: Tensor, pre: Tensor, step: Step, cache: Cache, token_map: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What every row needs: Engram, the attention input [B, S, D], and what it adds to the shared cache."""
        if self.plan.engram is not None:
            h = self.engram(h, step, cache, token_map)
        x = self.attn_norm(self.backend.collapse(h, pre))
        self.attn.compress(x, step, cache)
        return h, x

    def finish(self, h: Tensor, x: Tensor, step: Step, cache: Cache) -> tuple[Tensor, Tensor]:
        """Attention and experts: the streams after the layer, and the `pre` that the next site collapses with."""
        mix = self.mix("attn", h)
        h = self.backend.expand(h, self.attn(x, step, cache), mix)
        y = self.ffn(self.ffn_norm(self.backend.collapse(h, mix.pre)), step.images)
        mix = self.mix("ffn", h)
        return self.backend.expand(h, y, mix), mix.pre


class Transformer(LanguageModel):
    """The text model of a V4.1 config, with uninitialised weights.

    Args:
        config: a `V41Config`, or what `flashsim.load_config` takes.
        backend: `reference` or `triton`.
        dtype: of weights and activations; float32, bfloat16, or float64 for exact comparisons.
        device: `meta` allocates nothing.
        cache_rounding: the FP8 and FP4 rounding of what is cached, which is part of the trained model.
        token_map: [vocab_size] compressed ids of Engram, from the tokenizer; may be set later.

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
        token_map: Sequence[int] | Tensor | None = None,
    ):
        super().__init__()
        config = load_config(config)
        _check(config)
        self.config, self.backend = config, make_backend(backend)
        self.backend.check(config, dtype, torch.device(device), cache_rounding)
        self.dtype, self.cache_rounding = dtype, cache_rounding
        options = {"dtype": dtype, "device": device}
        self.plans = layer_plan(config)
        self.boundary = last_kv_source(config)  # the first layer of the decoder half
        self.embed = Embedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nn.ModuleList(Block(config, plan, self.backend, **options) for plan in self.plans)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.head = Linear(config.hidden_size, config.vocab_size, widened=True, **options)
        keep_small_copies(self)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.run = self.backend.rms_norm
        self.token_map: Tensor | None = None
        if token_map is not None:
            self.set_token_map(token_map)
        self.eval()  # packed records and no gradients, until train() is called

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embed.weight.device

    def set_token_map(self, token_map: Sequence[int] | Tensor) -> None:
        """Give Engram its compressed ids, one for each of vocab_size token ids.

        Raises:
            InputError: another length, or ids outside the compressed vocabulary.
        """
        ids = torch.as_tensor(token_map, dtype=torch.int64)
        vocabulary, compressed = self.config.vocab_size, self.config.engram_compressed_vocab_size
        if ids.shape != (vocabulary,):
            raise InputError(
                f"token_map has shape {tuple(ids.shape)}; accepted: one id for each of {vocabulary} tokens"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= compressed:
            raise InputError(f"token_map has {int(ids.min())}..{int(ids.max())}; accepted: 0 to {compressed - 1}")
        self.token_map = ids

    def new_cache(self, batch_size: int = 1, *, capacity: int = 0, rollback: int = ROLLBACK) -> Cache:
        """An empty cache for this model. `capacity` makes room for so many tokens at once.

        In training (`train()`) it is one that gradients pass through, which stores numbers in place of records.
        """
        return (DifferentiableCache if self.training else Cache)(
            self.config,
            batch_size,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            cache_rounding=self.cache_rounding,
            rollback=rollback,
        )

    # --- the three ways to call it ------------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        *,
        lengths: Sequence[int] | None = None,
        images: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits [B, S, vocab] of token ids [B, S], every layer for every row. Continues `cache` where one is given.

        Args:
            ids: whole numbers, each sequence's new tokens, padded at the end where sequences differ.
            cache: what came before, and where these tokens go.
            lengths: how many of the S tokens are real, for each sequence; rows beyond give logits of no meaning.
            images: [B, S] bool, tokens inside an image span.
            last: only the logits of each sequence's last real token, [B, vocab].

        Raises:
            InputError: ids of another shape, type or range; too many tokens; no compressed ids for Engram.
            MemoryError: more sequences or tokens than fit the memory that is free.
        """
        cache, step, ids = self._begin(ids, cache, lengths, images, whole=not last)
        with torch.inference_mode(not self.training):
            h, pre, _ = self._run(ids, step, cache, images, step.start)
            logits = self._logits(h, pre, step, last)
        return logits if self.training else logits.clone()  # an ordinary tensor again

    def prefill(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        *,
        tail: int | str | None = EXACT,
        chunk: int | None = None,
        lengths: Sequence[int] | None = None,
        images: Tensor | None = None,
        progress=None,
    ) -> Tensor:
        """Logits [B, vocab] of the last token of each prompt: encoder half for every row, decoder half for the tail.

        Args:
            tail: rows of each prompt that go through the decoder half. A number: the last so many, whose windows there
                begin with them (bounded; 128 in the trained model). `exact`: as many as it takes for the last logits
                and all windows to be those of a full forward, also after taking back `rollback` tokens. None: all.
            chunk: tokens of a prompt that run at a time; all by default.
            progress: called with (tokens done, tokens in all) after each chunk.

        Raises:
            InputError, MemoryError: as `forward`; InputError also for a tail or chunk below 1.
        """
        for name, value in (("tail", tail), ("chunk", chunk)):
            good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
            if not good and not (name == "tail" and value == EXACT):
                accepted = "a whole number from 1" + (f", {EXACT!r} or None" if name == "tail" else " or None")
                raise InputError(f"{name} is {value!r}; accepted: {accepted}")
        cache, step, ids = self._begin(ids, cache, lengths, images, chunk)
        rows = self.tail_rows(cache.rollback) if tail == EXACT else tail
        if rows is None or self.boundary is None:
            first = step.start
        else:
            first = [max(e - rows, s) for s, e in zip(step.start, step.end, strict=True)]
        logits = torch.zeros(step.batch, self.config.vocab_size, dtype=wide_dtype(self.dtype), device=self.device)
        size = chunk or step.rows
        for low in range(0, step.rows, size):
            count = [min(max(c - low, 0), size) for c in step.count]
            start = [s + min(low, c) for s, c in zip(step.start, step.count, strict=True)]
            part = Step(self.config, start, count, self.device)
            section = None if images is None else images[:, low : low + part.rows]
            ending = [b for b, (p, e) in enumerate(zip(part.end, step.end, strict=True)) if count[b] and p == e]
            with torch.inference_mode():
                made = self._run(ids[:, low : low + part.rows], part, cache, section, first)
                last = self._logits(*made, True)[ending] if ending else None
            if ending:
                logits[ending] = last
            if progress is not None:
                progress(min(low + size, step.rows), step.rows)
        return logits

    def _run(self, ids, step: Step, cache: Cache, images, first: list[int]):
        """All layers for the rows from position first[b] on, the encoder half for all; None where no row is left."""
        h, pre = self._embed(ids, cache, step, images)
        result = (h, pre, step)
        for layer in self.layers:
            h, pre, part = result
            h, x = layer.enter(h, pre, part, cache, self.token_map)
            if layer.plan.layer == self.boundary:
                # The rows before the tail are in the window of its first rows, and their input is at hand.
                low = [f - self.config.sliding_window + 1 for f in first]
                if halo := part.part(low, first):
                    layer.attn.remember(halo[1](x), halo[0], cache)
                kept = part.part(first, part.end)
                if kept is None:
                    result = None
                    break
                part, take = kept
                h, x = take(h), take(x)
            result = (*layer.finish(h, x, part, cache), part)
        cache.advance(step)
        return result

    def replay(self, ids: Tensor, stored: Cache, mode: str = "bounded", *, chunk: int | None = None) -> Replay:
        """Continue from the kept prefix of a prompt ids [1, N]: `cold`, `exact` or `bounded`, see `model.replay`."""
        return replay(self, ids, stored, mode, chunk=chunk)

    def explain(self, context: int = 4096) -> Explanation:
        """What each layer does, reads and writes with `context` tokens visible, see `model.explain`."""
        return explain(self, context)

    def tail_rows(self, rollback: int = 0) -> int | None:
        """Rows W + (R - 1)(W - 1) that make the tail exact, R the layers after the one that ends the encoder half.

        With `rollback` more, it is exact for each of so many last tokens.
        """
        return tail_rows(self.config, rollback)

    # --- parts --------------------------------------------------------------------------------------------------

    def _begin(self, ids, cache, lengths, images, chunk=None, whole=False) -> tuple[Cache, Step, Tensor]:
        cache, count, ids = begin(self, ids, cache, lengths)
        batch, rows = ids.shape
        self._require(batch, min(chunk or rows, rows), rows if whole else 1)
        if images is not None and (
            images.shape[:1] != ids.shape[:1] or images.shape[1] < rows or images.dtype != torch.bool
        ):
            raise InputError(f"images are {images.dtype} {tuple(images.shape)}; accepted: bool {tuple(ids.shape)}")
        if self.config.engram_layer_ids:
            if self.token_map is None:
                raise InputError(
                    "token_map is missing: Engram needs the compressed ids of the tokenizer (set_token_map)"
                )
            self.token_map = self.token_map.to(self.device)
        cache.reserve(max(s + c for s, c in zip(cache.lengths, count, strict=True)))
        return cache, Step(self.config, list(cache.lengths), count, self.device), ids

    def _require(self, batch: int, rows: int, logits: int) -> None:
        """Memory for the widest place of a layer, streams before and after and queries, and for rows of logits.

        Raises:
            MemoryError: it is not free.
        """
        config, size = self.config, self.backend.arithmetic(self.dtype, self.device).itemsize
        width = 2 * config.hc_mult * config.hidden_size + 2 * config.num_attention_heads * config.head_dim
        needed = batch * (rows * width * size + logits * config.vocab_size * 4)
        if needed > MODEST:
            hint = "; fewer sequences or tokens at a time take less, as prefill(chunk=) does"
            require(f"a step of {batch:,} x {rows:,} tokens", needed, self.device, hint)

    def _embed(self, ids: Tensor, cache: Cache, step: Step, images: Tensor | None) -> tuple[Tensor, Tensor]:
        images = None if images is None else images.to(self.device)
        cache.begin(step, ids, images)
        step.images = images
        e = self.embed(ids)
        if not self.training:
            e = e.to(self.backend.arithmetic(self.dtype, self.device))
        h = e.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)
        pre = torch.zeros(*h.shape[:3], dtype=wide_dtype(e.dtype), device=self.device)
        pre[..., 0] = 1
        return h, pre

    def _logits(self, h: Tensor, pre: Tensor, step: Step, last: bool) -> Tensor:
        x = self.norm(self.backend.collapse(h, pre))
        if last and step.rows == 1:
            x = x[:, 0]
        elif last:
            row = torch.tensor([max(c - 1, 0) for c in step.count], device=self.device)
            x = x[torch.arange(step.batch, device=self.device), row]
        return self.head(x).to(wide_dtype(self.dtype))


def _check(config) -> None:
    if not isinstance(config, V41Config):
        raise ConfigError("model_type", config.model_type, ", ".join(V41Config.model_types))
    config.needs("routed_scaling_factor", "norm_topk_prob")
    for field, accepted in (("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if getattr(config, field) != accepted:
            raise ConfigError(field, getattr(config, field), repr(accepted))
    for field, record in (("head_dim", main_record), ("head_dim", window_record), ("index_head_dim", index_record)):
        try:
            record(config).nbytes  # noqa: B018
        except LayoutError as error:
            raise ConfigError(field, getattr(config, field), f"what its records can hold ({error})") from None
    if config.index_head_dim < config.qk_rope_head_dim:
        accepted = f"a width of at least qk_rope_head_dim, {config.qk_rope_head_dim}"
        raise ConfigError("index_head_dim", config.index_head_dim, accepted)
    frequencies(config, True)  # names what rope_scaling lacks
    if config.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings", True, "false: V4.1 has a head of its own")
