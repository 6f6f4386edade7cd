"""Reads ``CUDA_VISIBLE_DEVICES``: which GPUs a process sees, and in which order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perseus_ds.errors import GpuError


def visible_ids(value: str | None) -> list[int | str] | None:
    """Read ``CUDA_VISIBLE_DEVICES`` as CUDA does.

    A list is cut off at its first invalid entry, a repeated one makes it empty, and the first entry decides whether
    it is read as indices or as UUIDs (CUDA programming guide, "CUDA Environment Variables").

    Args:
        value: The variable's value, None where it is not set.

    Returns:
        Indices or (abbreviated) GPU UUIDs in CUDA's order; None if every GPU is visible.

    Raises:
        GpuError: A MIG device is named; its clock cannot be set on its own.
    """
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    if any(entry.startswith("MIG-") for entry in entries):
        raise GpuError(
            f"CUDA_VISIBLE_DEVICES={value!r} names a MIG device: clocks belong to the whole GPU and cannot be set for "
            f'one slice. Use whole GPUs, or set "device": "simulated".'
        )
    ids: list[int | str] = []
    as_uuids = entries[0].startswith("GPU-")
    for entry in entries:
        number = re.match(r"\+?\d+", entry)
        if as_uuids:
            if not entry.startswith("GPU-"):
                break
            ids.append(entry)
        elif number:
            ids.append(int(number.group()))
        else:
            break
    return ids if len(set(ids)) == len(ids) else []


def pick(cuda_index: int, value: str | None, uuids: Sequence[str]) -> int:
    """Return the position among ``uuids`` of the GPU that CUDA calls ``cuda_index``.

    Args:
        cuda_index: CUDA ordinal within this process.
        value: ``CUDA_VISIBLE_DEVICES``, None where it is not set.
        uuids: UUIDs of the node's GPUs in PCI bus order.

    Raises:
        GpuError: There is no such GPU, or its abbreviated UUID matches several.
    """
    ids = visible_ids(value)
    chosen: int | str = cuda_index
    if ids is not None:
        if not 0 <= cuda_index < len(ids):
            raise GpuError(
                f"CUDA device {cuda_index} does not exist: CUDA_VISIBLE_DEVICES={value!r} shows {len(ids)} GPUs "
                f"(read as {ids}). Show the process a GPU, or start fewer ranks on this node."
            )
        chosen = ids[cuda_index]
    if isinstance(chosen, int):
        if not 0 <= chosen < len(uuids):
            raise GpuError(
                f"CUDA device {cuda_index} does not exist: it would be GPU {chosen} "
                f"(CUDA_VISIBLE_DEVICES={value!r}), but NVML sees {len(uuids)} GPUs. Check the variable and nvidia-smi."
            )
        return chosen
    return match_uuid(chosen, uuids)


def match_uuid(uuid: str, uuids: Sequence[str]) -> int:
    """Return the position of the one UUID that begins with ``uuid``; the prefix ``GPU-`` may be left out.

    Raises:
        GpuError: None or several do.
    """
    wanted = uuid.lower().removeprefix("gpu-")
    found = [position for position, full in enumerate(uuids) if full.lower().removeprefix("gpu-").startswith(wanted)]
    if len(found) != 1 or not wanted:
        raise GpuError(
            f"GPU UUID {uuid!r} fits {len(found)} of the GPUs that NVML sees ({', '.join(uuids) or 'none'}); "
            f"expected exactly one. Run `nvidia-smi -L` for the UUIDs."
        )
    return found[0]
