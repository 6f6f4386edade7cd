"""What is said of a GPU when a job opens it."""

import pytest
import torch

from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.devices import open_gpu


@pytest.mark.parametrize(("limit_w", "warnings"), [(400.0, 0), (300.0, 1)])
def test_a_power_limit_below_the_default_is_said_at_the_start_of_a_job(stub_nvml_here, caplog, limit_w, warnings):
    stub_nvml_here.gpus[0].power_limit_w = limit_w
    gpu = open_gpu(parse_block({"device": "nvml"}), torch.device("cpu"), rank=5, local_rank=0)
    gpu.close()
    assert caplog.text.count("rank 5, GPU 0") == warnings
    assert caplog.text.count("its power limit is 300 W of 400 W: plans are made for that limit") == warnings


def test_a_counter_of_the_whole_module_is_said_at_the_start_of_a_job(stub_nvml_here, caplog):
    for name, warnings in ((b"NVIDIA H100 80GB HBM3", 0), (b"NVIDIA GH200 480GB", 1)):
        for gpu in stub_nvml_here.gpus:
            gpu.name = name
        open_gpu(parse_block({"device": "nvml"}), torch.device("cpu"), rank=5, local_rank=0).close()
        assert caplog.text.count("covers the whole Grace-Hopper module") == warnings
