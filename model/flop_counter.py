"""FLOPs of a real step, counted where they are asked for, under the component names of `flashsim.decode_flops`.

    with FlopCounter(model) as counter:
        model(ids, cache=cache, last=True)
    print(counter.compare(flashsim.decode_flops(model.config, tokens)))

Every matrix product that PyTorch dispatches is counted, 2 FLOPs a multiply-accumulate, and given to the module or the
labelled line that asked for it. Kernels are not dispatched: the backend counts each where it launches it, from the
shapes of its operands, without the rows that a tile is filled up with.

| kernel | FLOPs | component |
| --- | --- | --- |
| linear | 2 rows x outputs x inputs, outputs in whole tiles of 32 | of the module |
| moe | 6 rows x k x D x I; 6 rows x D x I | `routed_experts`; `shared_experts` |
| indexer | 2 scores x index heads x index width | of the label: all entries, or the candidates |
| sparse_attention | 4 rows x heads x W x slots; the same x indices | `attention_window`; `attention_selected` |
| hyper_connection | 2 rows x (2 + K) K x K D; 2 rows x K x K x D | `hyper_connection`; `hyper_connection_mixing` |
| block_quant, compressor, topk, engram | no matrix products | |

Where both count the same thing the numbers are equal; `REASONS` names the components where they do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flashsim.flops import FlopsReport

_COMPONENTS = {
    r"attn\.(wq_a|wq_b)": "q_projection",
    r"attn\.wkv": "kv_projection",
    r"attn\.wo_a": "o_projection_group",
    r"attn\.wo_b": "o_projection_output",
    r"attn\.compressor\.(wkv|wgate)": "compressor",
    r"attn\.indexer\.wk": "indexer_key",
    r"attn\.indexer\.compressor\.(wkv|wgate)": "indexer_key_compressor",
    r"attn\.indexer\.wq_b": "indexer_query",
    r"attn\.indexer\.weights_proj": "indexer_weights",
    r"engram\.wkv": "engram_projection",
    r"ffn\.gate": "router",
    r"ffn\.experts\..*": "routed_experts",
    r"ffn\.shared_experts\..*": "shared_experts",
    r"head|lm_head": "lm_head",
    # V1 to V3.2
    r"self_attn\.(q_proj|q_a_proj|q_b_proj)": "q_projection",
    r"self_attn\.(k_proj|v_proj|kv_a_proj_with_mqa)": "kv_projection",
    r"self_attn\.kv_b_proj": "up_projection",
    r"self_attn\.o_proj": "o_projection",
    r"self_attn\.indexer\.wq_b": "indexer_query",
    r"self_attn\.indexer\.wk": "indexer_key",
    r"self_attn\.indexer\.weights_proj": "indexer_weights",
    r"mlp\.(gate|up|down)_proj": "dense_ffn",
    r"mlp\.gate": "router",
    r"mlp\.experts\..*": "routed_experts",
    r"mlp\.shared_experts\..*": "shared_experts",
}
REASONS = {
    "hyper_connection_mixing": "mixing the streams is a product here; the analytic count has the coefficients alone",
    "indexer_key": "projected in the step that completes a group; the analytic count spreads it over the group",
    "o_projection_group": "a packed group that ends inside a tile of 32 rows is multiplied to the end of the tile",
}

_asking: list[str | None] = []  # who asks for the products, the innermost last
_counting: list[FlopCounter] = []  # the counters that are entered


def count(flops: int, component: str | None = None) -> None:
    """Reports FLOPs that PyTorch does not dispatch, those of a kernel: of a component, or of who asks."""
    for counter in _counting:
        counter.count(component or _innermost(), flops)


def _innermost() -> str:
    return next((name for name in reversed(_asking) if name), "other")


class label:
    """Names the component of the products inside a `with` block; costs next to nothing when nobody counts."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        _asking.append(self.name)

    def __exit__(self, *error):
        _asking.pop()


def component_of(module: str) -> str | None:
    """The component of a module by its name, such as `layers.3.attn.wq_a`; None for one without products."""
    name = re.sub(r"^(model\.)?layers\.\d+\.", "", module)
    return next((component for pattern, component in _COMPONENTS.items() if re.fullmatch(pattern, name)), None)


class Comparison(NamedTuple):
    """Counted and predicted FLOPs of one component; `reason` names why they differ, None where they do not."""

    component: str
    counted: int
    predicted: int
    reason: str | None


class FlopCounter:
    """Counts while it is entered; `flops` is a dict of FLOPs by component."""

    def __init__(self, model: nn.Module):
        self._names = {module: component_of(name) for name, module in model.named_modules()}
        self._mode = _Products(self)
        self.flops: dict[str, int] = {}

    def __enter__(self):
        self._hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        self._mode.__enter__()
        _counting.append(self)
        return self

    def __exit__(self, *error):
        _counting.remove(self)
        self._mode.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, args) -> None:
        _asking.append(self._names.get(module))

    def _leave_module(self, module: nn.Module, args, result) -> None:
        _asking.pop()

    def count(self, component: str, flops: int) -> None:
        """Add the FLOPs of an op that PyTorch does not see."""
        self.flops[component] = self.flops.get(component, 0) + flops

    def compare(self, predicted: FlopsReport) -> list[Comparison]:
        """Every component of either side.

        Raises:
            ValueError: two numbers differ for a reason that is not known.
        """
        analytic: Mapping[str, int] = predicted.by("component")
        rows = []
        for component in dict.fromkeys([*analytic, *self.flops]):
            counted, expected = self.flops.get(component, 0), analytic.get(component, 0)
            reason = None if counted == expected else REASONS.get(component)
            if counted != expected and reason is None:
                raise ValueError(f"{component}: {counted:,} FLOPs counted, {expected:,} predicted")
            rows.append(Comparison(component, counted, expected, reason))
        return rows


class _Products(TorchDispatchMode):
    """Hands every dispatched matrix product to the counter."""

    def __init__(self, counter: FlopCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func._overloadpacket
        if packet not in flop_registry:
            with self:  # linear, matmul and the like are made of counted products
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        self.counter.count(_innermost(), flop_registry[packet](*args, **kwargs, out_val=result))
        return result
