"""What transformers' own `save_pretrained` wrote of a low-rank or an extracted model.

`Trainer.save_model` and `extract(model).save_pretrained` write no word about which layers are low
rank, but the names and shapes of the tensors say it: `u` and `v` of a low-rank layer, `0.weight`
and `1.weight` of two plain ones in the place of one, `first.weight` and `second.weight` of a
pivoted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from maestro_lod.errors import CheckpointError, OptionError, listed
from maestro_lod.integrations.model_directory import read_weights
from maestro_lod.layers.ranks import Ranks, low_rank_layers, match_ranks, resolve
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.model.structure import Form, Structure, restructure, uninitialized


def load_stock(model: PreTrainedModel, directory: Path, ranks: Ranks | None) -> None:
    """Load such a directory into the dense model, in place: its layers become as they were."""
    tensors = read_weights(directory)
    structure = _structure(model, tensors, directory)
    restructure(model, structure, fill=uninitialized)
    state = _by_own_names(model, tensors, directory)
    if ranks is not None:
        _keep_ranks(model, state, ranks, directory)
    match_ranks(model, state)
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{directory} is of another model. {error}") from None


def _saved_keys(model: PreTrainedModel) -> dict[str, str]:
    """Return under which name transformers saves each tensor of a model, where it only renames."""
    state = {key: value.detach().to("meta") for key, value in model.state_dict().items()}
    renamed: Mapping[str, Tensor] = revert_weight_conversion(model, state)
    saved = {id(value): key for key, value in renamed.items()}
    return {key: saved.get(id(value), key) for key, value in state.items()}


def _structure(model: PreTrainedModel, tensors: Mapping[str, Tensor], where: Path) -> Structure:
    saved_keys = _saved_keys(model)
    structure: Structure = {}
    ambiguous = []
    for name, module in model.named_modules():
        if low_rank_type(type(module)) is None or "weight" not in module._parameters:
            continue
        saved = saved_keys.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
        own, there = module._parameters["weight"], tensors.get(f"{saved}.weight")
        if f"{saved}.v" in tensors:
            structure[name] = Form("low-rank", len(tensors[f"{saved}.v"]))
        elif f"{saved}.1.weight" in tensors:
            structure[name] = Form("factored", tensors[f"{saved}.1.weight"].shape[1])
        elif f"{saved}.second.weight" in tensors:
            kept = tensors.get(f"{saved}.kept")
            groups = getattr(module, "groups", 1)
            rank = tensors[f"{saved}.second.weight"].shape[1] if kept is None else len(kept)
            structure[name] = Form("pivoted", rank if kept is None else rank // groups)
        elif own is not None and there is not None and not _is_of_torch(module):
            if there.shape == own.shape[::-1] != own.shape:  # extract made it one of torch's
                structure[name] = Form("dense")
            elif own.shape == own.shape[::-1]:
                ambiguous.append(name)
    forms = {form.kind for form in structure.values()}
    if ambiguous and forms & {"factored", "pivoted", "dense"}:
        raise CheckpointError(
            f"{where} does not say whether the square weights of {listed(ambiguous)} are "
            "transposed. Save the low-rank model with maestro_lod.integrations.huggingface."
            "save_pretrained, and extract after loading."
        )
    return structure | _shared_head(model, structure, tensors, saved_keys)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _shared_head(
    model: Any, structure: Structure, tensors: Mapping[str, Tensor], saved: Mapping[str, str]
) -> Structure:
    """Find a head that uses the factors of its embedding: it has no weight of its own."""
    names = {id(module): name for name, module in model.named_modules()}
    try:
        head = names.get(id(model.get_output_embeddings()))
        embedding = names.get(id(model.get_input_embeddings()))
    except NotImplementedError:  # a model that has no such thing, or several
        return {}
    if head is None or embedding is None or embedding not in structure or head in structure:
        return {}
    alone = saved.get(f"{head}.weight", f"{head}.weight") not in tensors
    return {head: Form("shared", embedding=embedding)} if alone else {}


def _by_own_names(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    """Return the tensors by the names that the model has for them, or refuse what does not fit."""
    saved_keys = _saved_keys(model)
    own = model.state_dict(keep_vars=True)
    state = {key: tensors[saved] for key, saved in saved_keys.items() if saved in tensors}
    foreign = sorted(tensors.keys() - saved_keys.values())
    loaded = {id(own[key]) for key in state}
    missing = [key for key, value in own.items() if key not in state and id(value) not in loaded]
    if foreign or missing:
        raise CheckpointError(
            f"{directory} is not {type(model).__name__}'s, or transformers has rewritten weights "
            f"when it saved them, as it does with experts; not matched: {listed(foreign)}; "
            f"missing: {listed(missing)}. Save with maestro_lod.integrations.huggingface."
            "save_pretrained."
        )
    return state


def _keep_ranks(model: nn.Module, state: dict[str, Tensor], ranks: Ranks, directory: Path) -> None:
    """Cut the factors in a state to the ranks asked for."""
    layers = low_rank_layers(model)
    if not layers:
        raise OptionError(f"{directory} holds one size, an extracted model: leave ranks out.")
    limits = {name: (layer.rank, layer.full_rank) for name, layer in layers.items()}
    for name, rank in resolve(ranks, limits).items():
        for key, dim in ((f"{name}.u", 1), (f"{name}.v", 0)):
            state[key] = state[key].narrow(dim, 0, rank)
