"""Reads the parts of a stage from its module, by which layouts are described.

Layers that cannot be moved between stages, because their module is structured in an unknown way, have no parts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, MTP, Part, kind_of_layer

_WRAPPED = ("module", "_orig_mod")
"""Names of the module inside a wrapper, such as ``DistributedDataParallel``, and inside a compiled module."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def unwrapped(module: Any) -> Any:
    """Return the module inside of wrappers, whose only child it is."""
    while isinstance(module, nn.Module):
        children = dict(module.named_children())
        name = next(iter(children), "")
        if len(children) != 1 or name not in _WRAPPED:
            break
        module = children[name]
    return module


def parts_of_huggingface(module: Any) -> list[Part] | None:
    """Return the parts of a stage of a Hugging Face model. None for other modules."""
    return getattr(unwrapped(module), "layout_parts", None)


def parts_of_pipeline_module(module: Any) -> list[Part]:
    """Return the parts of a ``PipelineModule`` of DeepSpeed on this rank. Some of its layers may be functions."""
    first = next(iter(module.forward_funcs), None)
    if (parts := parts_of_huggingface(getattr(first, "stage", None))) is not None:
        return parts  # the stage is a single layer
    found = []
    for index, layer in enumerate(module.forward_funcs, module.parts[module.stage_id]):
        inner, run = layer, layer
        if isinstance(layer, functools.partial) and layer.args:  # a tied layer with its own forward function
            inner, run = layer.args[0], layer.func
        kind = getattr(run, "__name__", type(run).__name__)
        found.append(_part(kind, {str(index): inner}))
    return found


def parts_of_gpt(chunk: Any) -> list[Part] | None:
    """Return the parts of a model chunk in order. None if it is not structured like the GPT of Megatron-Core."""
    module = unwrapped(chunk)
    is_gpt = all(hasattr(module, name) for name in ("pre_process", "post_process", "decoder"))
    if not is_gpt or hasattr(module, "encoder"):  # T5 has both
        return None
    parts = [_part(EMBEDDING, {"": module.embedding})] if module.pre_process else []
    # A separate stage for multi-token prediction has no decoder.
    for layer in getattr(module.decoder, "layers", ()):
        kind = kind_of_layer([type(layer.mlp)]) if hasattr(layer, "mlp") else type(layer).__name__
        parts.append(_part(kind, {"": layer}))
    parts += [_part(MTP, {"": layer}) for layer in getattr(getattr(module, "mtp", None), "layers", ())]
    return parts + ([_part(HEAD, {"": module.output_layer})] if module.post_process else [])


def parts_of_module(module: nn.Module, *, is_first: bool, is_last: bool) -> list[Part] | None:
    """Return the parts of a stage's module in order. None if its layers are not in a container.

    Modules before the layers of the first stage are its embedding, and those after the layers of the last one are its
    head.
    """
    module = unwrapped(module)
    if (parts := parts_of_huggingface(module)) is not None:
        return parts
    if isinstance(module, _CONTAINERS):
        return [_layer(name, child) for name, child in module.named_children()]
    children = [(name, child) for name, child in module.named_children() if not isinstance(child, nn.Identity)]
    containers = [name for name, child in children if isinstance(child, _CONTAINERS) and len(child)]
    ends = {name: child for name, child in children if not isinstance(child, _CONTAINERS) and _parameters(child)}
    if len(containers) > 1 or not (containers or ends):
        return None
    names = [name for name, _ in children]
    # Without layers, the first stage has only the embedding, and the last one only the head.
    at = names.index(containers[0]) if containers else len(names) if is_first else -1
    before = {name: child for name, child in ends.items() if names.index(name) < at}
    behind = {name: child for name, child in ends.items() if names.index(name) > at}
    if (before and not is_first) or (behind and not is_last):
        return None
    layers = dict(children)[containers[0]].named_children() if containers else ()
    parts = [_part(EMBEDDING, before)] if before else []
    parts += [_layer(f"{containers[0]}.{name}", layer) for name, layer in layers]
    return parts + ([_part(HEAD, behind)] if behind else [])


def _layer(name: str, layer: nn.Module) -> Part:
    if isinstance(layer, nn.Embedding):
        kind = EMBEDDING
    elif next(layer.children(), None) is None:
        kind = type(layer).__name__
    else:
        kind = kind_of_layer(map(type, layer.modules()))
    return _part(kind, {name: layer})


def _part(kind: str, modules: Mapping[str, Any]) -> Part:
    """Return the part of some modules by their names, of which Megatron-Core has none."""
    names = [name for name in modules if name]
    return Part(kind=kind, names=names, parameters=sum(map(_parameters, modules.values())))


def _parameters(module: Any) -> int:
    is_module = isinstance(module, nn.Module)  # DeepSpeed's layers may be functions
    return sum(parameter.numel() for parameter in module.parameters()) if is_module else 0
