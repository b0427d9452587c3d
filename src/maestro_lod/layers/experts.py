"""Experts with stacked weights, over stacks that are separate modules.

transformers stores all experts of a layer in a few tensors (experts, out, in) and reads those.
`Experts` calls its stacks; it takes the same arguments and returns the same results. Gates
between the stacks are computed by the original's code. The file imports only torch, so that an
extracted model needs these classes and its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.layers.pivoted import INDEX_TYPE, PivotedForm

ROUTED = {
    "afmoe": "Afmoe", "aria": "Aria", "axk1": "AXK1", "axk2": "AXK2",
    "bailing_hybrid": "BailingHybrid", "beam": "Beam", "cohere2_moe": "Cohere2Moe",
    "deepseek_ocr2": "DeepseekOcr2Text", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32", "deepseek_v4": "DeepseekV4",
    "diffusion_gemma": "DiffusionGemmaText", "dots1": "Dots1", "ernie4_5_moe": "Ernie4_5_Moe",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeMoe", "exaone_moe": "ExaoneMoe", "flex_olmo": "FlexOlmo",
    "flint": "Flint", "gemma4": "Gemma4Text", "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite", "glm4v_moe": "Glm4vMoeText", "glm5_next": "Glm5NextText",
    "glm_moe_dsa": "GlmMoeDsa", "gpt_oss": "GptOss", "granitemoe": "GraniteMoe",
    "granitemoe_swa": "GraniteMoeSWA", "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared", "hunyuan_v1_moe": "HunYuanMoEV1", "hy_v3": "HYV3",
    "hy_v4": "HYV4", "inkling": "Inkling", "jamba": "Jamba", "kimi_linear": "KimiLinear",
    "kolibri1": "Kolibri1", "laguna": "Laguna", "lfm2_moe": "Lfm2Moe", "mellum": "Mellum",
    "mimo_v2_flash": "MiMoV2Flash", "minimax": "MiniMax", "minimax_m2": "MiniMaxM2",
    "minimax_m3_vl": "MiniMaxM3VL", "mistral4": "Mistral4", "mistral_large4": "MistralLarge4Text",
    "mixtral": "Mixtral", "muse_spark": "MuseSpark", "nemotron_h": "NemotronH", "olmoe": "Olmoe",
    "openai_privacy_filter": "OpenAIPrivacyFilter", "phimoe": "Phimoe", "qwen2_moe": "Qwen2Moe",
    "qwen3_5_moe": "Qwen3_5Moe", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerText", "qwen3_vl_moe": "Qwen3VLMoeText",
    "qwen4_exp": "Qwen4ExpText", "solar_open": "SolarOpen", "step3p7": "Step3p7",
    "unlimited_ocr": "UnlimitedOcrText", "zaya": "Zaya",
}  # fmt: skip
"""The class names of transformers' experts, by family. All have the attributes `has_gate`,
`has_bias` and `is_transposed`, and the method `_apply_gate`."""


def apply_stacked(rows: Tensor, experts: Tensor, *stacks: Tensor) -> Tensor:
    """Multiply each row by the matrices of its expert, one stack (experts, m, n) after the other.

    `experts` holds the expert of each row, in ascending order.
    """
    number = stacks[0].shape[0]  # len() of a tensor would fix the batch of an exported graph
    if _needs_one_graph() or rows.is_meta or rows.shape[0] <= number:
        columns = rows[:, :, None]
        for stack in stacks:
            columns = stack[experts] @ columns
        return columns[:, :, 0]
    by_expert = torch.split(rows, experts.bincount(minlength=number).tolist())
    for stack in stacks:  # unbound at once: their gradients are then stacked once
        matrices = stack.unbind()
        by_expert = tuple(F.linear(x, m) for x, m in zip(by_expert, matrices, strict=True))
    return torch.cat(by_expert)


def _needs_one_graph() -> bool:
    """Return whether a graph is recorded, which must be valid for any routing."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


class Stack(nn.Module):
    """The dense matrices of all experts, (experts, out, in), or (experts, in, out) if transposed.

    As in both other stacks, the inputs are rows in the order of their experts, and the experts.
    """

    transposed: bool

    def __init__(self, weight: nn.Parameter, *, transposed: bool) -> None:
        super().__init__()
        self.weight, self.transposed = weight, transposed

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        return apply_stacked(rows, experts, self.weight.mT if self.transposed else self.weight)


class StackedProduct(nn.Module):
    """The matrices of all experts, each a product of its factors; all have one rank."""

    def __init__(self, u: nn.Parameter, v: nn.Parameter, experts: int) -> None:
        super().__init__()
        self.u, self.v = u, v  # (experts · m, r), (r, experts · n)
        self.experts = experts

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        rank = self.v.shape[0]
        first = self.v.view(rank, self.experts, -1).transpose(0, 1)
        return apply_stacked(rows, experts, first, self.u.view(self.experts, -1, rank))


class StackedPivoted(PivotedForm):
    """The matrices of all experts in pivoted form; all have one rank."""

    order: Tensor

    def __init__(self, kept: nn.Parameter, others: nn.Parameter, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order.to(INDEX_TYPE))
        self.kept, self.others = kept, others  # (experts, r, n), (experts, m - r, r)

    @property
    def rank(self) -> int:
        return self.kept.shape[1]

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        kept = apply_stacked(rows, experts, self.kept)
        both = torch.cat([kept, apply_stacked(kept, experts, self.others)], 1)
        return both.gather(1, self.order[experts].long())


class Experts(nn.Module):
    """Routed experts over stacks of any kind, with the original's names."""

    user_attributes: tuple[str, ...] = ()
    """The names of attributes that a user added to the original layer."""
    applies_parts = False
    _transposed_by_default = False

    @staticmethod
    def blocker(dense: nn.Module) -> str:
        """Return why this layer cannot be unpacked, '' if it can."""
        for name in _stack_names(dense):
            weight = dense._parameters.get(name)
            if weight is None or weight.ndim != 3:
                return f"its {name} is not a parameter of shape (experts, out, in)"
        for name, child in dense.named_children():
            if child.state_dict():
                return f"its {name} has weights of its own"
        if getattr(dense, "_is_expert_parallel", False):
            return "its experts are split over devices"
        return ""

    def __init__(self, dense: nn.Module) -> None:
        """Take the options and parameters of `dense`; its stacked weights become `Stack`s."""
        super().__init__()
        names = _stack_names(dense)
        transposed = bool(getattr(dense, "is_transposed", self._transposed_by_default))
        for name, parameter in dense.named_parameters():
            if name in names:
                self.add_module(name, Stack(parameter, transposed=transposed))
            else:
                self.register_parameter(name, parameter)
        # the original without its tensors computes the gates; a tuple keeps it out of the modules
        self._original = (_without_memory(dense),)
        self.train(dense.training)

    def __getattr__(self, name: str) -> Any:
        """Return options of the original (`num_experts`, `act_fn`, …) too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("_"):
                raise
            return getattr(original[0], name)

    def repacked(self, parts: Mapping[str, nn.Module]) -> nn.Module | None:
        """Return the original layer over these stacks, None unless all are dense."""
        plain: nn.Module = _without_memory(self._original[0])
        for name in plain._parameters:
            part = parts.get(name, self)
            if not isinstance(part, Stack) and part is not self:
                return None
            source = self._parameters[name] if part is self else part.weight
            assert isinstance(source, nn.Parameter)
            copied = nn.Parameter(source.detach().clone(), source.requires_grad)
            plain._parameters[name] = copied
        return plain.train(self.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k = top_k_index.shape[-1]
        experts, order = top_k_index.flatten().sort()
        outputs = self._outputs(hidden_states[order // top_k], experts)
        weighted = outputs * top_k_weights.flatten()[order, None]
        restored = torch.empty_like(weighted).index_copy(0, order, weighted)
        summed: Tensor = restored.view(-1, top_k, restored.shape[-1]).sum(1)
        return summed.to(hidden_states.dtype)

    def _outputs(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Apply to each row its expert; rows are in the order of the experts."""
        into, out = _stack_names(self)
        outputs = self._applied(out, self._gated(self._applied(into, rows, experts)), experts)
        norm = getattr(self._original[0], "post_expert_norm", None)
        return outputs if norm is None else norm(outputs)

    def _applied(self, name: str, rows: Tensor, experts: Tensor) -> Tensor:
        product: Tensor = self._modules[name](rows, experts)  # type: ignore[misc]
        bias = self._parameters.get(f"{name}_bias")
        return product if bias is None else product + bias[experts]

    def _gated(self, inner: Tensor) -> Tensor:
        original: Any = self._original[0]
        gate = original._apply_gate if getattr(original, "has_gate", True) else original.act_fn
        gated: Tensor = gate(inner)
        return gated

    def extra_repr(self) -> str:
        return type(self._original[0]).__name__


class SortedExperts(Experts):
    """The experts of Llama 4: each gets the same number of rows, in order and already weighted."""

    _transposed_by_default = True

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        number = self._original[0].num_experts
        each = rows.shape[0] // number
        experts = torch.arange(number, device=rows.device).repeat_interleave(each)
        return self._outputs(rows, experts)

    def _gated(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        gated: Tensor = up * self._original[0].act_fn(gate)
        return gated


def _stack_names(layer: Any) -> tuple[str, str]:
    return ("gate_up_proj" if getattr(layer, "has_gate", True) else "up_proj"), "down_proj"


def _without_memory(dense: nn.Module) -> Any:
    empty = copy.copy(dense)  # with its options, and its activation function
    empty._parameters = dict.fromkeys(dense._parameters)
    empty._buffers = {}
    return empty
