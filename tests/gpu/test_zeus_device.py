"""The Zeus device: the real package on the stub library, and a clear error where the package is missing.

Each case runs in a process of its own, because Zeus keeps the GPUs that it found first.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from stub_nvml.controller import StubNvml

from perseus_ds.gpu.zeus import ZeusAmdGpu

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
    """Start a stand-in for zeusd with some GPUs; returns how to reach it, and the numbers of GPUs that it is given."""
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
    """Eight GPUs as zeusd lists them, of which some are those of this container."""
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
        (gpus_of_a_node({}), ["none of them is at its address"], set()),
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


@pytest.mark.parametrize("method", ["reset_locked_clocks", "reset_gpu_locked_clocks"])
def test_an_amd_gpus_clock_is_reset_by_the_method_that_zeus_has(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Zeus after 0.16 has both, and refuses the one of 0.16."""
    device = pytest.importorskip("zeus.device.gpu")
    called = []

    def refuse() -> None:
        raise AssertionError("not supported on AMD GPUs")

    methods = {"reset_gpu_locked_clocks": refuse, method: lambda: called.append(method)}
    about = {"gpu_index": 0, "get_name": lambda: "MI300X", "get_supported_graphics_clocks": lambda: (2100, 500)}
    monkeypatch.setattr(device, "get_gpus", lambda: SimpleNamespace(gpus=[SimpleNamespace(**about, **methods)]))
    ZeusAmdGpu(0).reset_clock()
    assert called == [method]
