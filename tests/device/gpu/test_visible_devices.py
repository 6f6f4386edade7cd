from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_ds.device.gpu.visible import match_uuid, pick, visible_ids
from perseus_ds.errors import GpuError

UUIDS = ["GPU-8e5f1a2b-0000-4000-8000-000000000000", "GPU-8e77aaaa-0000-4000-8000-000000000001", "GPU-1cafe000-0"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0,1", [0, 1]),
        (" 3 , 1 ", [3, 1]),
        ("2,-1,0", [2]),
        ("1,none,2", [1]),
        ("1gpu2,2", [1, 2]),
        ("0,0", []),
        ("NoDevFiles", []),
        ("GPU-8e5f,GPU-1cafe", ["GPU-8e5f", "GPU-1cafe"]),
        ("GPU-8e5f,1", ["GPU-8e5f"]),
        ("GPU-8e5f,GPU-8e5f", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str | None, expected: list[int | str] | None) -> None:
    assert visible_ids(value) == expected


@pytest.mark.parametrize("value", ["MIG-1234", "GPU-8e5f,MIG-1234", "MIG-GPU-8e5f/1/0"])
def test_a_mig_device_is_refused(value: str) -> None:
    with pytest.raises(GpuError, match=r"MIG device.*whole GPU"):
        visible_ids(value)


@pytest.mark.parametrize(
    ("cuda_index", "value", "expected"),
    [(1, None, 1), (0, "2,0", 2), (1, "2,0", 0), (0, "GPU-1", 2), (1, "GPU-1caf,GPU-8e7", 1)],
)
def test_a_cuda_ordinal_finds_its_gpu(cuda_index: int, value: str | None, expected: int) -> None:
    assert pick(cuda_index, value, UUIDS) == expected


@pytest.mark.parametrize(
    ("cuda_index", "value", "message"),
    [
        (3, None, "NVML sees 3 GPUs"),
        (-1, None, "does not exist"),
        (0, "", "shows 0 GPUs"),
        (2, "0,1", "shows 2 GPUs"),
        (0, "7", "would be GPU 7"),
        (0, "GPU-8e", "fits 2 of the GPUs"),
        (0, "GPU-dead", "fits 0 of the GPUs"),
    ],
)
def test_a_gpu_that_cannot_be_told_is_an_error(cuda_index: int, value: str | None, message: str) -> None:
    with pytest.raises(GpuError, match=message):
        pick(cuda_index, value, UUIDS)


def test_an_empty_uuid_matches_nothing() -> None:
    with pytest.raises(GpuError):
        match_uuid("GPU-", UUIDS[:1])


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(8)), st.integers(1, 8))
def test_any_order_of_indices_is_kept(order: list[int], length: int) -> None:
    shown = order[:length]
    uuids = [f"GPU-{index}" for index in range(8)]
    value = ",".join(map(str, shown))
    assert [pick(position, value, uuids) for position in range(length)] == shown
    by_uuid = ",".join(uuids[index] for index in shown)
    assert [pick(position, by_uuid, uuids) for position in range(length)] == shown
