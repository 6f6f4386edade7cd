"""The Zeus device: the real package on the stub library, and a clear error if it is missing.

Each case runs in its own process, because Zeus keeps the GPUs that it found first.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from stub_nvml.controller import StubNvml

from perseus_ds.gpu.selection import amd_gpu
from perseus_ds.gpu.zeus import ZeusAmdGpu, _amd_gpus, open_address

VISIBLE = {"CUDA_VISIBLE_DEVICES": "2,1"}

USE = """
import sys
from perseus_ds.errors import GpuError
from perseus_ds.gpu.zeus import open_address, open_zeus_gpu
try:
    gpu = open_zeus_gpu(0)
    gpu.check_lock_permission()
    gpu.lock_clock(1200)
    again = open_address(gpu.address.partition(":")[2])
    print(again.index, again.clock_mhz(), gpu.energy_j() > 0, gpu.power_w())
    gpu.lock_clock(900)
except GpuError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(autouse=True)
def _no_zeusd(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT", "ZEUSD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


def test_without_the_package_the_error_says_what_to_install(stub_nvml: StubNvml) -> None:
    done = stub_nvml.run("-c", f"import sys; sys.modules['zeus'] = None\n{USE}", environment=VISIBLE)
    assert done.returncode == 1
    assert "needs the package zeus" in done.stderr
    assert 'pip install "perseus-ds[zeus]"' in done.stderr


def test_zeus_locks_the_gpu_that_cuda_means(stub_nvml: StubNvml) -> None:
    done = stub_nvml.run("-c", USE, environment=VISIBLE)
    assert done.stdout == "2 1200 True 250.0\n", done.stderr
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 900, 0]


def test_a_missing_permission_points_to_zeusd(stub_nvml: StubNvml) -> None:
    stub_nvml.gpus[2].fail("reset_locked", "no_permission")
    done = stub_nvml.run("-c", USE, environment=VISIBLE)
    assert "GpuPermissionError: Resetting the clock of GPU 2" in done.stderr
    assert "ZEUSD_SOCK_PATH" in done.stderr


def test_a_zeusd_that_does_not_answer_is_reported(stub_nvml: StubNvml, tmp_path: Path) -> None:
    done = stub_nvml.run("-c", USE, environment={**VISIBLE, "ZEUSD_SOCK_PATH": str(tmp_path / "none.sock")})
    assert "Cannot reach Zeusd" in done.stderr
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 0, 0]


@pytest.fixture
def zeusd(tmp_path: Path) -> Iterator[Callable[[list[dict[str, Any]]], tuple[dict[str, str], list[str]]]]:
    """A function that starts a replacement of zeusd.

    It returns the environment variables of the replacement and the GPU numbers that it receives.
    """
    servers = []

    def start(gpus: list[dict[str, Any]]) -> tuple[dict[str, str], list[str]]:
        given: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                groups = ["gpu-read", "gpu-control"]
                self._answer({"gpus": gpus, "cpus": [], "enabled_api_groups": groups, "auth_required": False})

            def do_POST(self) -> None:
                given.extend(parse_qs(urlparse(self.path).query)["gpu_ids"])
                self._answer({})

            def address_string(self) -> str:
                return "a job"

            def log_message(self, *arguments: object) -> None:
                pass

            def _answer(self, value: object) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        servers.append(socketserver.ThreadingUnixStreamServer(str(tmp_path / "zeusd.sock"), Handler))
        threading.Thread(target=servers[-1].serve_forever).start()
        return {"ZEUSD_SOCK_PATH": str(tmp_path / "zeusd.sock")}, given

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def gpus_of_a_node(addresses: dict[int, str], field: str = "pci_address") -> list[dict[str, Any]]:
    """Return eight GPUs as listed by zeusd, some of which belong to this container."""
    gpus: list[dict[str, Any]] = [{"id": n, "name": "A100", field: f"0000:f{n}:00.0"} for n in range(8)]
    for number, address in addresses.items():
        gpus[number][field] = address
    return gpus


@pytest.mark.parametrize("field", ["pci_address", "uuid"])
def test_zeusd_is_given_the_number_that_a_gpu_has_on_the_node(stub_nvml: StubNvml, zeusd: Any, field: str) -> None:
    """This container's GPU 2 is the node's GPU 6."""
    bus_id, uuid = stub_nvml.gpus[2].bus_id.decode(), stub_nvml.gpus[2].uuid.decode()
    place = uuid if field == "uuid" else bus_id.removeprefix("0000").lower()  # four digits for the domain
    environment, given = zeusd(gpus_of_a_node({6: place}, field))
    done = stub_nvml.run("-c", USE, environment={**VISIBLE, **environment})
    assert done.returncode == 0, done.stderr
    assert set(given) == {"6"}


@pytest.mark.parametrize(
    ("known", "refusal", "numbers"),
    [
        (gpus_of_a_node({}), ["none of them has its address"], set()),
        (
            [{"id": number, "name": "A100"} for number in range(8)],
            ["cannot be found among the 8 GPUs of zeusd", "Update zeusd to a version that reports PCI addresses"],
            set(),
        ),
        ([{"id": number, "name": "A100"} for number in range(4)], [], {"2"}),
    ],
    ids=["it does not have the GPU", "it does not say which GPU is which", "it does not, and all GPUs are visible"],
)
def test_a_zeusd_is_only_asked_to_lock_a_gpu_whose_number_is_certain(
    stub_nvml: StubNvml, zeusd: Any, known: list[dict[str, Any]], refusal: list[str], numbers: set[str]
) -> None:
    environment, given = zeusd(known)
    done = stub_nvml.run("-c", USE, environment={**VISIBLE, **environment})
    assert (done.returncode, set(given)) == (bool(refusal), numbers), done.stderr
    assert all(text in done.stderr for text in refusal)


@pytest.fixture
def amd_node(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Four AMD GPUs with different numbers in HIP and amdsmi.

    Returns:
        The resets that Zeus performs.
    """
    device = pytest.importorskip("zeus.device.gpu.amd")
    reset: list[tuple[int, str]] = []

    class Amdsmi:
        def amdsmi_get_processor_handles(self) -> list[int]:
            return [3, 2, 0, 1]  # in the order of HIP's numbers

        def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
            return {"hip_id": handle, "hip_uuid": f"GPU-{handle}00000000000000{handle}"}

        def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
            return f"0000:{16 * handle:02x}:00.0"

    class Gpu:
        def __init__(self, number: int) -> None:
            self.reset_gpu_locked_clocks = lambda: reset.append((number, "reset_gpu_locked_clocks"))

        def get_name(self) -> str:
            return "MI300X"

        def get_supported_graphics_clocks(self) -> tuple[int, int]:
            return 2100, 500

    monkeypatch.setitem(sys.modules, "amdsmi", Amdsmi())
    monkeypatch.setattr(device, "AMDGPUs", lambda: SimpleNamespace(gpus=[Gpu(int(os.environ["HIP_VISIBLE_DEVICES"]))]))
    return reset


def test_the_gpu_that_hip_means_is_opened_by_its_place_on_the_bus(amd_node: list[tuple[int, str]]) -> None:
    gpu = ZeusAmdGpu(amd_gpu(1, {"ROCR_VISIBLE_DEVICES": "3,2"}, _amd_gpus()))
    assert gpu.address == "zeus:0000:20:00.0"
    assert str(gpu) == "GPU 2 (MI300X)"
    gpu.reset_clock()
    open_address("0000:20:00.0").reset_clock()  # as in another process, which sees all GPUs
    assert amd_node == 2 * [(2, "reset_gpu_locked_clocks")]
    assert "HIP_VISIBLE_DEVICES" not in os.environ


def test_an_amd_gpus_clock_is_reset_by_the_method_that_newer_versions_of_zeus_have(
    amd_node: list[tuple[int, str]],
) -> None:
    gpu = ZeusAmdGpu(_amd_gpus()[0])
    gpu._zeus.reset_locked_clocks = lambda: amd_node.append((0, "reset_locked_clocks"))
    gpu.reset_clock()
    assert amd_node == [(0, "reset_locked_clocks")]
