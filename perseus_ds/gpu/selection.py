"""Finds the GPU on which a process computes among the GPUs of its node.

The most reliable source comes first: the UUID or the PCI address that CUDA or HIP reports for the device. Without it,
the environment variables that hide and renumber GPUs are interpreted in the same way as the runtimes do. A match that
is not certain is an error, because it could change the clock of another job's GPU.

Sources: CUDA programming guide, "CUDA Environment Variables"; ROCm documentation, "GPU isolation techniques"; HIP's
runtime, which reads ``CUDA_VISIBLE_DEVICES`` if ``HIP_VISIBLE_DEVICES`` is empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perseus_ds.errors import GpuError


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of the node: NVML's index (HIP's if no GPU is hidden), UUID such as ``GPU-1b2c…``, and PCI address.

    UUID and address are empty if the driver does not report them.
    """

    number: int
    uuid: str
    pci_address: str
    name: str = ""


def pci_numbers(address: str) -> tuple[int, ...]:
    """Return the numbers of a PCI address. Its domain may have four or eight digits."""
    return tuple(int(part, 16) for part in re.split("[:.]", address))


def nvidia_gpu(
    ordinal: int, environment: Mapping[str, str], gpus: Sequence[NodeGpu], uuid: str | None = None
) -> NodeGpu:
    """Return the GPU that CUDA calls ``ordinal`` in a process with an environment.

    ``gpus`` are in NVML's order, which is that of PCI addresses. ``uuid`` is the one that CUDA reports, if any. If the
    match is not certain, or the GPU is a MIG device, a :class:`GpuError` is raised.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is not None and any(entry.strip().startswith("MIG-") for entry in value.split(",")):
        raise GpuError(
            f"CUDA_VISIBLE_DEVICES={value!r} names a MIG device: clocks belong to the whole GPU and cannot be set for "
            'one MIG device. Use whole GPUs, or set "device": "simulated".'
        )
    if uuid is not None:
        return by_uuid(uuid, gpus)
    visible = _listed("CUDA_VISIBLE_DEVICES", value, gpus)
    chosen = _chosen(ordinal, visible, f"CUDA_VISIBLE_DEVICES={value!r}", len(gpus))
    names = sorted({gpu.name for gpu in gpus})
    by_number = value is None or not value.strip().startswith("GPU-")
    if by_number and len(names) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise GpuError(
            f"This node has different GPUs ({', '.join(names)}), which CUDA numbers by speed and NVML by PCI "
            "bus. Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the job, so that clocks reach the right GPU."
        )
    return chosen


def amd_gpu(
    ordinal: int, environment: Mapping[str, str], gpus: Sequence[NodeGpu], pci_address: str | None = None
) -> NodeGpu:
    """Return the GPU that HIP calls ``ordinal`` in a process with an environment.

    ``ROCR_VISIBLE_DEVICES`` hides GPUs from HIP and renumbers them. ``HIP_VISIBLE_DEVICES`` then does the same with the
    remaining ones. ``gpus`` are in the order in which HIP numbers them if none is hidden; ``pci_address`` is the one
    that HIP reports, if any. If the match is not certain, a :class:`GpuError` is raised.
    """
    if pci_address is not None:
        return by_pci_address(pci_address, gpus)
    read = {name: environment.get(name, "").strip() for name in _OF_HIP}
    if len({value for value in read.values() if value}) > 1 or read["GPU_DEVICE_ORDINAL"]:
        shown = ", ".join(f"{name}={value!r}" for name, value in read.items() if value)
        raise GpuError(
            f"Cannot determine which GPU HIP's device {ordinal} is: {shown}, and this torch does not report its PCI "
            "address. Perseus could change the clock of another job's GPU. Set only HIP_VISIBLE_DEVICES or use a newer "
            "torch."
        )
    rocr = environment.get("ROCR_VISIBLE_DEVICES")
    visible = _listed("ROCR_VISIBLE_DEVICES", rocr, gpus)
    name, value = next(((name, value) for name, value in read.items() if value), ("HIP_VISIBLE_DEVICES", None))
    visible = _listed(name, value, visible)
    return _chosen(ordinal, visible, f"ROCR_VISIBLE_DEVICES={rocr!r}, {name}={value!r}", len(gpus))


_OF_HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def by_uuid(uuid: str, gpus: Sequence[NodeGpu]) -> NodeGpu:
    """Return the only GPU with a UUID that starts with ``uuid``. The prefix ``GPU-`` is optional."""
    wanted = uuid.lower().removeprefix("gpu-")
    found = [gpu for gpu in gpus if wanted and gpu.uuid.lower().removeprefix("gpu-").startswith(wanted)]
    return _the_one(found, f"GPU UUID {uuid!r}", [gpu.uuid for gpu in gpus])


def by_pci_address(address: str, gpus: Sequence[NodeGpu]) -> NodeGpu:
    """Return the GPU at a PCI address."""
    found = [gpu for gpu in gpus if gpu.pci_address and pci_numbers(gpu.pci_address) == pci_numbers(address)]
    return _the_one(found, f"PCI address {address}", [gpu.pci_address for gpu in gpus])


def _the_one(found: Sequence[NodeGpu], wanted: str, known: Sequence[str]) -> NodeGpu:
    if len(found) != 1:
        raise GpuError(
            f"{wanted} matches {len(found)} of the GPUs that the driver reports ({', '.join(known) or 'none'}). "
            "Expected exactly one. `nvidia-smi -L` or `amd-smi list` shows them."
        )
    return found[0]


def _listed(name: str, value: str | None, gpus: Sequence[NodeGpu]) -> Sequence[NodeGpu]:
    """Return the GPUs that an environment variable makes visible, in its order.

    CUDA and HIP ignore the entries from the first invalid one on. A repeated entry makes no GPU visible. CUDA expects
    only UUIDs if the first entry is a UUID, otherwise only numbers.
    """
    if value is None:
        return gpus
    entries = [entry.strip() for entry in value.split(",")]
    names_uuids = entries[0].startswith("GPU-")
    shown: list[NodeGpu] = []
    for entry in entries:
        number = re.match(r"\+?\d+", entry)
        if names_uuids and entry.startswith("GPU-"):
            shown.append(by_uuid(entry, gpus))
        elif number and not names_uuids and int(number.group()) < len(gpus):
            shown.append(gpus[int(number.group())])
        else:
            break
    return shown if len(set(shown)) == len(shown) else []


def _chosen(ordinal: int, visible: Sequence[NodeGpu], shown_by: str, known: int) -> NodeGpu:
    if not 0 <= ordinal < len(visible):
        raise GpuError(
            f"GPU {ordinal} of this process does not exist: {shown_by} shows {len(visible)} of the {known} GPUs that "
            "the driver reports. Show the process a GPU, or start fewer ranks on this node."
        )
    return visible[ordinal]
