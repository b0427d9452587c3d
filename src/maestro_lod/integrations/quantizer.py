"""The quantizer by which transformers itself loads and saves low-rank models.

transformers lets a quantization method rebuild a model before its weights are loaded. This one
gives the model the structure that `config.json` names: which layers have two factors, and of which
rank. Nothing is quantized. Importing this module registers the method "maestro_lod".

The tensors of such a directory have the names of the low-rank model. Under each name of the dense
model that is missing there, the file has an empty tensor: a loader that does not know the method
stops at its shape, where it would otherwise initialize these weights randomly.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from maestro_lod.errors import CheckpointError, LayerError, listed
from maestro_lod.files.json_files import require_shape
from maestro_lod.files.tensor_file import distinct
from maestro_lod.layers.pivoted import PivotedForm
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint_header import structure_of_plain
from maestro_lod.model.replace import copy_on_meta
from maestro_lod.model.structure import (
    Form,
    Structure,
    read_structure,
    restructure,
    uninitialized,
)
from maestro_lod.model.surgery import fuse

if TYPE_CHECKING:  # transformers imports this module before it has these
    from transformers import PreTrainedModel

METHOD = "maestro_lod"
"""The quantization method that config.json names."""
_VERSION = 1
_FORMS = get_args(get_type_hints(Form)["kind"])
_LAYER = {"form": str, "rank?": int, "factors_of?": str, "dense_only?": bool}


# -- what config.json says ---------------------------------------------------------------------


@register_quantization_config(METHOD)
class LowRankConfig(QuantizationConfigMixin):
    """The structure of a low-rank model, as `quantization_config` in config.json.

    Args:
        layers: For each layer that differs from the dense model's: its "form" and, where it has
            them, its "rank", the embedding "factors_of" which a head uses, and "dense_only".
        by_rank: Whether `u` is stored with the rank first, so that the leading ranks of both
            factors are the first bytes of their tensors.
        version: Of this format.
    """

    def __init__(
        self,
        layers: dict[str, Any] | None = None,
        by_rank: bool = False,
        version: int = _VERSION,
        **others: Any,
    ) -> None:
        self.quant_method: Any = METHOD  # transformers' own methods are members of an enumeration
        if type(version) is not int or version > _VERSION:
            raise CheckpointError(
                f"quantization_config in config.json has version {version!r}, this library reads "
                f"up to {_VERSION}. Update maestro-lod."
            )
        self.version = version
        self.by_rank = bool(by_rank)
        self.layers: dict[str, Any] = {} if layers is None else layers
        try:
            require_shape(self.layers, {str: _LAYER})
            for name, layer in self.layers.items():
                if layer["form"] not in _FORMS:
                    raise ValueError(f"{name}.form is {layer['form']!r}")
                if layer.get("rank", 0) < 0:
                    raise ValueError(f"{name}.rank is {layer['rank']}")
        except ValueError as error:
            raise CheckpointError(
                f"quantization_config in config.json is damaged ({error}). Get the directory again."
            ) from None

    @property
    def structure(self) -> Structure:
        """The structure that the layers describe."""
        return {
            name: Form(layer["form"], layer.get("rank"), layer.get("factors_of"))
            for name, layer in self.layers.items()
        }

    @property
    def shares_head(self) -> bool:
        """Whether an output head uses the factors of an embedding."""
        return any(layer["form"] == "shared" for layer in self.layers.values())

    def describe(self, model: nn.Module, structure: Structure, *, by_rank: bool) -> None:
        """Describe a model, in place."""
        low_rank = low_rank_layers(model)
        self.by_rank = by_rank
        self.layers = {}
        for name, form in structure.items():
            layer: dict[str, Any] = {"form": form.kind}
            layer |= {} if form.rank is None else {"rank": form.rank}
            layer |= {} if form.embedding is None else {"factors_of": form.embedding}
            layer |= {"dense_only": True} if name in low_rank and low_rank[name].dense_only else {}
            self.layers[name] = layer


# -- what a directory holds --------------------------------------------------------------------


def structure_in(model: PreTrainedModel) -> Structure:
    """Return how a low-rank or extracted model differs from the dense one of its architecture."""
    if low_rank_layers(model):
        return read_structure(model)
    return structure_of_plain(model, dense_on_meta(model))


def dense_on_meta(model: PreTrainedModel) -> nn.Module:
    """Return the dense model of the same architecture, without memory."""
    if low_rank_layers(model):
        return restructure(copy_on_meta(model), {}, fill=uninitialized)
    kind: Any = type(model)
    with torch.device("meta"):
        dense: nn.Module = kind._from_config(model.config)
    return dense


def can_store_by_rank(model: nn.Module, structure: Structure) -> bool:
    """Return whether every tensor named `u` is the factor of a low-rank layer."""
    keys = [key for key in model.state_dict() if key.rpartition(".")[2] == "u"]
    return bool(keys) and all(_is_low_rank(structure, key[:-2]) for key in keys)


def stored_state(model: PreTrainedModel, structure: Structure, by_rank: bool) -> dict[str, Tensor]:
    """Return the tensors that a directory of the model holds, by name.

    Tied weights are stored once. Empty tensors stand for what only the dense model has.
    """
    by_name = model.state_dict()
    state, aliases = distinct(by_name)
    tied = _tied_keys(model)
    state |= {key: by_name[key].clone() for key in aliases if key not in tied}
    if by_rank:
        state |= {key: state[key].transpose(0, 1) for key in state if key.endswith(".u")}
    for key in dense_on_meta(model).state_dict():
        if key not in by_name:
            state[key] = torch.empty(1)[:0]  # of a memory of its own: what shares one looks tied
    return state


def _tied_keys(model: PreTrainedModel) -> set[str]:
    """Return the names of all tensors that transformers ties to another one."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {*ties, *ties.values()}


def attach(model: PreTrainedModel) -> None:
    """Let transformers' own `save_pretrained` write this low-rank model so that it can be read."""
    holder: Any = model
    holder.hf_quantizer = LowRankQuantizer(LowRankConfig(), pre_quantized=True)


def untie_missing(model: Any) -> None:
    """Forget ties of weights that the model does not have: those of a shared head."""
    own = model.state_dict().keys()
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target in own and source in own
    }


# -- the quantizer -----------------------------------------------------------------------------


@register_quantizer(METHOD)
class LowRankQuantizer(HfQuantizer):
    """Builds the layers that config.json names, so that transformers loads their factors."""

    quantization_config: LowRankConfig

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:  # the Trainer asks: nothing is quantized, so all trains
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise LayerError(
                f"quantization_config={METHOD!r} cannot compress a model while it is loaded. "
                "Compress the directory first: lod compress DIR --data FILE --out OUT."
            )

    def update_attn_implementation(self, config: Any) -> Any:
        if self.quantization_config.shares_head:  # see `_shares_head` in huggingface.py
            config.tie_word_embeddings = True
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        names = names_in(model, self.quantization_config.structure)
        structure = renamed(self.quantization_config.structure, names)
        dense = dict(model.named_modules())
        try:
            restructure(model, structure, fill=uninitialized)
        except LayerError as error:
            raise CheckpointError(f"config.json is of another model: {error}") from None
        for name, module in model.named_modules():
            if name in structure and name in dense and _is_several(module):
                _add_placeholders(module, dense[name])
        for name in names:
            if self.quantization_config.layers[name].get("dense_only"):
                model.get_submodule(names[name]).dense_only = True
        if any(form.kind == "shared" for form in structure.values()):
            untie_missing(model)
        if checkpoint_files:
            stored = shapes_in(checkpoint_files)
            self._require_fit(model, structure, stored, Path(checkpoint_files[0]).parent)
            empty = {f"^{re.escape(key)}$" for key, shape in stored.items() if shape == (0,)}
            known = model._keys_to_ignore_on_load_unexpected or set()
            model._keys_to_ignore_on_load_unexpected = {*known, *empty}

    def _require_fit(
        self, model: Any, structure: Structure, stored: Mapping[str, tuple[int, ...]], where: Path
    ) -> None:
        """Refuse tensors of other shapes, and files without all tensors of the architecture."""
        prefix = f"{model.base_model_prefix}."
        wrong, missing = [], []
        for key, value in model.state_dict().items():
            found = next(
                (n for n in (key, key.removeprefix(prefix), prefix + key) if n in stored), None
            )
            if found is None:
                missing.append(key)
                continue
            expected = tuple(value.shape)
            name, _, factor = key.rpartition(".")
            if self.quantization_config.by_rank and factor == "u" and _is_low_rank(structure, name):
                expected = (expected[1], expected[0], *expected[2:])
            if stored[found] != expected:
                wrong.append(f"{found} is {stored[found]}, not {expected}")
        needed = [key for key in missing if _is_needed(key, model, structure, missing)]
        if wrong or needed:
            raise CheckpointError(
                f"the weights in {where} are not those that its config.json describes: missing: "
                f"{listed(needed)}; of another shape: {listed(wrong)}. Get the directory again."
            )

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """Keep names, since those in the file are the model's own, and transpose each `u`."""
        if not self.quantization_config.by_rank:
            return []
        loading = importlib.import_module("transformers.core_model_loading")
        return [loading.WeightConverter(r"\.u$", ".u", [loading.Transpose(0, 1)])]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model._weight_conversions = []  # the model's own names are those of the file
        for module in model.modules():
            if _is_several(module):
                _remove_placeholders(module)
        vars(model.config).pop("auto_map", None)  # it names a file that would not be saved again
        for layer in low_rank_layers(model).values():
            layer.to(layer.u.device)  # what it knows of its active rank was made without memory
        if any(form.kind == "shared" for form in self.quantization_config.structure.values()):
            model.config.tie_word_embeddings = False
        return model

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        structure = structure_in(model)
        if not structure:  # it was fused since
            self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
            model._weight_conversions = None
            return None, {}
        self.quantization_config.describe(model, structure, by_rank=False)
        model.config.quantization_config = self.quantization_config
        model._weight_conversions = []
        return stored_state(model, structure, by_rank=False), {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Multiply all factors out, in place."""
        layers = low_rank_layers(model)
        if not layers:
            raise LayerError(
                f"{type(model).__name__} has no low-rank layer that could be multiplied out: its "
                "layers are plain ones already."
            )
        fuse(model, by=dict.fromkeys(layers, "dense"))
        model._weight_conversions = None
        return model


def _is_several(module: nn.Module) -> bool:
    """Return whether a module may be several plain layers in the place of one."""
    return isinstance(module, nn.Sequential | PivotedForm)


def _add_placeholders(layers: nn.Module, dense: nn.Module) -> None:
    """Let code that initializes a module above find a weight here, which needs no values."""
    for key, value in dense._parameters.items():
        if value is not None and layers._parameters.get(key) is None:
            placeholder = torch.empty_like(value, device="meta")
            placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
            vars(layers)[key] = placeholder


def _remove_placeholders(layers: nn.Module) -> None:
    for key in [key for key, value in vars(layers).items() if isinstance(value, Tensor)]:
        if hasattr(value := vars(layers)[key], "_is_hf_initialized") and value.is_meta:
            del vars(layers)[key]


def _is_low_rank(structure: Structure, name: str) -> bool:
    return name in structure and structure[name].kind == "low-rank"


def _is_needed(key: str, model: Any, structure: Structure, missing: list[str]) -> bool:
    """Return whether a missing tensor would be initialized randomly without a reason.

    A tied one will be another one, and a model with another head than the saved one has its head
    initialized by transformers, which reports it.
    """
    ties: Mapping[str, str] = model.all_tied_weights_keys
    source = ties.get(key, key)
    if any(k not in missing for k in (source, *(t for t, s in ties.items() if s == source))):
        return False
    optional = model._keys_to_ignore_on_load_missing or ()
    if any(re.search(pattern, key) for pattern in optional):
        return False
    name = key.rpartition(".")[0]
    in_structure = any(name == n or name.startswith(f"{n}.") for n in structure)
    same = type(model).__name__ in (model.config.architectures or ())
    return same or in_structure


def shapes_in(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is not a safetensors file ({error}).") from error
    return shapes


def names_in(model: Any, structure: Structure) -> dict[str, str]:
    """Return the names that layers of a saved model have in this one, without those it lacks.

    A model with a head has the model without one as a part, named by its `base_model_prefix`.
    """
    prefix, parts = model.base_model_prefix, model._modules
    names = {}
    for name in structure:
        first, _, rest = name.partition(".")
        if first in parts:
            names[name] = name
        elif first == prefix and rest:
            names[name] = rest
        elif prefix in parts:
            names[name] = f"{prefix}.{name}"
    if type(model).__name__ in (model.config.architectures or ()):
        return names
    modules = dict(model.named_modules())
    opened = {names[n] for n in names if structure[n].kind == "unpacked" and names[n] in modules}
    return {
        saved: name
        for saved, name in names.items()
        if name in modules or any(name.startswith(f"{above}.") for above in opened)
    }


def renamed(structure: Structure, names: Mapping[str, str]) -> Structure:
    """Return a structure by other names, without the layers that have none."""
    return {
        names[name]: form._replace(embedding=names.get(form.embedding or ""))
        for name, form in structure.items()
        if name in names and (form.embedding is None or form.embedding in names)
    }
