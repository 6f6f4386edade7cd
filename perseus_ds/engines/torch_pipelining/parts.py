"""Parts of a model in a stage of ``torch.distributed.pipelining``, with the names used by torchtitan."""

from __future__ import annotations

from typing import Any

from torch import nn

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, Part, kind_of_layer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def parts_of_module(module: nn.Module, *, is_first: bool, is_last: bool) -> list[Part] | None:
    """Return the parts of a stage's module in order. None if its layers are not in a container.

    Modules before the layers of the first stage are its embedding, and those after the layers of the last one are its
    head.
    """
    if (parts := huggingface_parts(module)) is not None:
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
    parts = [_end(EMBEDDING, before)] if before else []
    parts += [_layer(f"{containers[0]}.{name}", layer) for name, layer in layers]
    return parts + ([_end(HEAD, behind)] if behind else [])


def huggingface_parts(module: Any) -> list[Part] | None:
    """Return the parts of a stage of a Hugging Face model. None for other modules."""
    parts: list[Part] | None = getattr(module, "layout_parts", None)
    return parts


def _layer(name: str, layer: nn.Module) -> Part:
    if isinstance(layer, nn.Embedding):
        kind = EMBEDDING
    elif next(layer.children(), None) is None:
        kind = type(layer).__name__
    else:
        kind = kind_of_layer(map(type, layer.modules()))
    return Part(kind=kind, names=[name], parameters=_parameters(layer))


def _end(kind: str, modules: dict[str, nn.Module]) -> Part:
    return Part(kind=kind, names=list(modules), parameters=sum(map(_parameters, modules.values())))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
