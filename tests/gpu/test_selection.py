"""GPU selection of a rank, from reports of CUDA or HIP and from environment variables."""

from __future__ import annotations

import pytest

from perseus_ds.errors import GpuError
from perseus_ds.gpu.selection import NodeGpu, amd_gpu, nvidia_gpu

A, B, C, D = (
    NodeGpu(number, uuid, f"0000:{address}:00.0", "H100")
    for number, (uuid, address) in enumerate(
        [("GPU-8e5f1a2b-00", "07"), ("GPU-8e77aaaa-01", "0f"), ("GPU-1cafe000-02", "47"), ("GPU-2bad0000-03", "c1")]
    )
)
NODE = [A, B, C, D]
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environment", "reported", "ordinal", "expected"),
    [
        ({}, None, 2, C),
        ({CUDA: "3,1"}, None, 1, B),
        ({CUDA: "2,-1,0"}, None, 0, C),
        ({CUDA: "1,none,2"}, None, 0, B),
        ({CUDA: "1gpu2,2"}, None, 1, C),
        ({CUDA: "GPU-8e5f,GPU-1cafe"}, None, 1, C),
        ({CUDA: "GPU-8e5f,1"}, None, 0, A),
        ({CUDA: "0,1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "GPU-8e77aaaa-01", 0, B),
        ({CUDA: "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, 0, B),
        ({CUDA: "2,-1,0"}, None, 1, "shows 1 of the 4 GPUs"),
        ({CUDA: "GPU-8e5f,1"}, None, 1, "shows 1 of the 4 GPUs"),
        ({CUDA: ""}, None, 0, "shows 0 of the 4 GPUs"),
        ({CUDA: "0,0"}, None, 0, "shows 0 of the 4 GPUs"),
        ({CUDA: "7"}, None, 0, "shows 0 of the 4 GPUs"),
        ({}, None, -1, "GPU -1 of this process does not exist"),
        ({CUDA: "GPU-8e"}, None, 0, "matches 2 of the GPUs"),
        ({CUDA: "GPU-"}, None, 0, "matches 0 of the GPUs"),
        ({}, "77777777-07", 0, "matches 0 of the GPUs"),
        ({CUDA: "MIG-1234"}, "8e5f1a2b-00", 0, "MIG device.*whole GPU"),
        ({CUDA: "GPU-8e5f,MIG-GPU-8e5f/1/0"}, None, 0, "MIG device.*whole GPU"),
    ],
)
def test_cudas_device_is_the_gpu_that_cuda_means(environment, reported, ordinal, expected):
    if isinstance(expected, NodeGpu):
        assert nvidia_gpu(ordinal, environment, NODE, reported) == expected
    else:
        with pytest.raises(GpuError, match=expected):
            nvidia_gpu(ordinal, environment, NODE, reported)


@pytest.mark.parametrize(
    ("environment", "reported", "certain"),
    [
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None, False),
        ({CUDA: "0"}, None, False),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, True),
        ({CUDA: "GPU-8e5f"}, None, True),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "8e5f1a2b-00", True),
    ],
)
def test_the_order_of_unlike_gpus_is_not_guessed(environment, reported, certain):
    node = [A, NodeGpu(1, "GPU-77", "0000:0f:00.0", "T4")]
    if certain:
        assert nvidia_gpu(0, environment, node, reported) == A
    else:
        with pytest.raises(GpuError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            nvidia_gpu(0, environment, node, reported)


@pytest.mark.parametrize(
    ("environment", "reported", "ordinal", "expected"),
    [
        ({}, None, 2, C),
        ({ROCR: "2,3"}, None, 1, D),
        ({ROCR: "GPU-1cafe000-02,GPU-8e5f1a2b-00"}, None, 0, C),
        ({HIP: "3,1"}, None, 0, D),
        ({CUDA: "3,1"}, None, 1, B),
        ({ROCR: "1,2,3", HIP: "2,0"}, None, 0, D),
        ({HIP: "1", CUDA: "1"}, None, 0, B),
        ({HIP: "", CUDA: "2"}, None, 0, C),
        ({ROCR: "1", "GPU_DEVICE_ORDINAL": "3"}, "0000:47:00.0", 0, C),
        ({ROCR: "1"}, "00000000:C1:00.0", 0, D),
        ({ROCR: "1", HIP: "1"}, None, 0, "shows 0 of the 4 GPUs"),
        ({ROCR: "GPU-dead"}, None, 0, "matches 0 of the GPUs"),
        ({HIP: "1", CUDA: "2"}, None, 0, "Cannot determine.*HIP_VISIBLE_DEVICES='1', CUDA_VISIBLE_DEVICES='2'"),
        ({"GPU_DEVICE_ORDINAL": "1"}, None, 0, "Cannot determine.*GPU_DEVICE_ORDINAL='1'"),
        ({}, "0000:99:00.0", 0, "PCI address 0000:99:00.0 matches 0 of the GPUs"),
    ],
)
def test_hips_device_is_the_gpu_that_hip_means(environment, reported, ordinal, expected):
    if isinstance(expected, NodeGpu):
        assert amd_gpu(ordinal, environment, NODE, reported) == expected
    else:
        with pytest.raises(GpuError, match=expected):
            amd_gpu(ordinal, environment, NODE, reported)
