"""Parts of a model in a virtual stage of Megatron-Core."""

from __future__ import annotations

from typing import Any

from torch import nn

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, MTP, Part, kind_of_layer


def parts_of_chunk(chunk: Any) -> list[Part] | None:
    """Return the parts of a model chunk in order. None if it is not structured like Megatron-Core's GPT."""
    module = unwrapped(chunk)
    if not all(hasattr(module, name) for name in ("pre_process", "post_process", "decoder")):
        return None
    parts = [_part(EMBEDDING, module.embedding)] if module.pre_process else []
    parts += [_part(_kind_of(layer), layer) for layer in module.decoder.layers]
    parts += [_part(MTP, layer) for layer in getattr(getattr(module, "mtp", None), "layers", ())]
    return parts + ([_part(HEAD, module.output_layer)] if module.post_process else [])


def ties_embedding(chunk: Any) -> bool:
    """Return whether the embedding and the head share a weight."""
    return bool(getattr(unwrapped(chunk), "share_embeddings_and_output_weights", False))


def unwrapped(chunk: Any) -> Any:
    """Return a model chunk without its wrappers, such as ``DistributedDataParallel``."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _kind_of(layer: nn.Module) -> str:
    return kind_of_layer([type(layer.mlp)]) if hasattr(layer, "mlp") else type(layer).__name__


def _part(kind: str, module: nn.Module) -> Part:
    return Part(kind=kind, parameters=sum(parameter.numel() for parameter in module.parameters()))
