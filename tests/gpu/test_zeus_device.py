"""The Zeus device: the real package on the stub library, and a clear error if it is missing.

Each case on NVIDIA GPUs runs in its own process, because Zeus keeps the GPUs that it found first.
"""

import gc
import json
import os
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from urllib.parse import parse_qs, urlparse

import pytest

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import with_energy
from perseus_ds.gpu.selection import amd_gpu
from perseus_ds.gpu.zeus import ZeusAmdGpu, _amd_gpus, open_address

USE = """
import os, sys
from perseus_ds.errors import GpuError
from perseus_ds.gpu.zeus import open_address, open_zeus_gpu
try:
    gpu = open_zeus_gpu(0, None, None, os.environ)
    gpu.check_lock_permission()
    gpu.lock_clock(1200)
    again = open_address(gpu.address.partition(":")[2])
    print(again.index, again.clock_mhz(), gpu.energy_j() > 0, gpu.power_w())
    gpu.lock_clock(900)
except GpuError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def use(stub_nvml, monkeypatch):
    """A function that uses the node's GPU 2 through Zeus in another process."""
    for variable in ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT", "ZEUSD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return lambda code=USE, **variables: stub_nvml.run(
        "-c", code, environment={"CUDA_VISIBLE_DEVICES": "2,1", **variables}
    )


def test_without_the_package_the_error_says_what_to_install(use):
    done = use(f"import sys; sys.modules['zeus'] = None\n{USE}")
    assert done.returncode == 1
    assert "needs the package zeus" in done.stderr
    assert 'pip install "perseus-ds[zeus]"' in done.stderr


def test_zeus_locks_the_gpu_that_cuda_selects(use, stub_nvml):
    done = use()
    assert done.stdout == "2 1200 True 250.0\n", done.stderr
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 900, 0]


def test_a_missing_permission_points_to_zeusd(use, stub_nvml):
    stub_nvml.gpus[2].fail("reset_locked", "no_permission")
    done = use()
    assert "GpuPermissionError: Resetting the clock of GPU 2" in done.stderr
    assert "ZEUSD_SOCK_PATH" in done.stderr


def test_a_zeusd_that_does_not_answer_is_reported(use, stub_nvml, tmp_path):
    error = use(ZEUSD_SOCK_PATH=str(tmp_path / "none.sock")).stderr
    assert error.startswith("GpuBusyError: ")  # it may be restarting, so a clock is set again
    assert "Cannot reach Zeusd" in error
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 0, 0]


@pytest.fixture
def zeusd(tmp_path):
    """A replacement of zeusd, with the GPUs that it lists and the GPU numbers that it has received."""
    node = SimpleNamespace(path=str(tmp_path / "zeusd.sock"), gpus=[], received=set())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            groups = ["gpu-read", "gpu-control"]
            gpus = [{**gpu, "cumulative_energy_available": True} for gpu in node.gpus]  # required after Zeus 0.16
            self._answer({"gpus": gpus, "cpus": [], "enabled_api_groups": groups, "auth_required": False})

        def do_POST(self):
            node.received.update(parse_qs(urlparse(self.path).query)["gpu_ids"])
            self._answer({})

        def address_string(self):
            return "a job"

        def log_message(self, *arguments):
            pass

        def _answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with socketserver.ThreadingUnixStreamServer(node.path, Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield node
        server.shutdown()


UNKNOWN = [{"id": number, "name": "A100", "pci_address": f"0000:f{number}:00.0"} for number in range(8)]


@pytest.mark.parametrize("field", ["pci_address", "uuid"])
def test_zeusd_is_given_the_number_of_a_gpu_on_the_node(use, stub_nvml, zeusd, field):
    """This container's GPU 2 is the node's GPU 6."""
    bus_id, uuid = stub_nvml.gpus[2].bus_id.decode(), stub_nvml.gpus[2].uuid.decode()
    identity = uuid if field == "uuid" else bus_id.removeprefix("0000").lower()  # four digits for the domain
    zeusd.gpus = [*UNKNOWN[:6], {"id": 6, "name": "A100", field: identity}, *UNKNOWN[7:]]
    done = use(ZEUSD_SOCK_PATH=zeusd.path)
    assert done.returncode == 0, done.stderr
    assert zeusd.received == {"6"}


@pytest.mark.parametrize(
    ("known", "refusal", "numbers"),
    [
        (UNKNOWN, "none of them has its address", set()),
        ([{"id": n, "name": "A100"} for n in range(8)], "Update zeusd to a version that reports PCI addresses", set()),
        ([{"id": n, "name": "A100"} for n in range(4)], "", {"2"}),
    ],
    ids=["it lacks the GPU", "it does not say which GPU is which", "it does not, and all GPUs are visible"],
)
def test_zeusd_locks_only_a_gpu_that_is_certainly_the_right_one(use, zeusd, known, refusal, numbers):
    zeusd.gpus = known
    done = use(ZEUSD_SOCK_PATH=zeusd.path)
    assert (done.returncode, zeusd.received) == (bool(refusal), numbers), done.stderr
    assert refusal in done.stderr


class AmdNode(list):
    """Four AMD GPUs with different numbers in HIP and amdsmi. It lists the locks and resets that Zeus performs.

    Attributes:
        name: Product name of the GPUs. Those with odd numbers are the second dies of MI250X.
        clock: What the driver reports as the clock.
        has_instant_power: Whether it reports more than average power.
    """

    name = "MI300X"
    clock = 1700
    has_instant_power = True
    open_managers = 0


@pytest.fixture
def amd_node(monkeypatch):
    """A node with AMD GPUs."""
    device = pytest.importorskip("zeus.device.gpu.amd")
    common = pytest.importorskip("zeus.device.gpu.common")
    node = AmdNode()

    class Amdsmi:
        def amdsmi_get_processor_handles(self):
            return [3, 2, 0, 1]  # in the order of HIP's numbers

        def amdsmi_get_gpu_enumeration_info(self, handle):
            return {"hip_id": handle, "hip_uuid": f"GPU-{handle}00000000000000{handle}"}

        def amdsmi_get_gpu_device_bdf(self, handle):
            return f"0000:{16 * handle:02x}:00.0"

        def amdsmi_get_clock_info(self, handle, kind):
            return {"clk": node.clock, "min_clk": 500, "max_clk": 2100}

        AmdSmiClkType = SimpleNamespace(GFX=0)

    class Gpus:
        def __init__(self):
            number = int(os.environ["HIP_VISIBLE_DEVICES"])
            is_second_die = "MI250" in node.name and number % 2 == 1

            def of_first_die(value):
                if is_second_die:
                    raise common.ZeusGPUNotSupportedError(f"GPU {number} is a chiplet without power monitoring")
                return value

            def instant(value):
                if not node.has_instant_power:
                    raise common.ZeusGPUNotSupportedError("instant power is not supported")
                return value

            node.open_managers += 1
            self.gpus = [
                SimpleNamespace(
                    handle=number,
                    get_name=lambda: node.name,
                    get_supported_graphics_clocks=lambda: (2100, 500),
                    set_gpu_locked_clocks=lambda *clocks_mhz: node.append((number, clocks_mhz)),
                    reset_gpu_locked_clocks=lambda: node.append((number, "reset_gpu_locked_clocks")),
                    supports_get_total_energy_consumption=lambda: not is_second_die,
                    get_total_energy_consumption=lambda: of_first_die(1_234_500 + 1000 * number),  # [mJ]
                    get_instant_power_usage=lambda: instant(of_first_die(487_250)),  # [mW]
                    get_average_power_usage=lambda: of_first_die(300_500),
                )
            ]

        def __del__(self):
            node.open_managers -= 1  # Zeus shuts the driver's library down

    monkeypatch.setitem(sys.modules, "amdsmi", Amdsmi())
    monkeypatch.setattr(device, "AMDGPUs", Gpus)
    return node


def test_the_gpu_that_hip_selects_is_opened_by_its_pci_address(amd_node):
    gpu = ZeusAmdGpu(amd_gpu(1, {"ROCR_VISIBLE_DEVICES": "3,2"}, _amd_gpus()), _amd_gpus())
    assert gpu.address == "zeus:0000:20:00.0"
    assert str(gpu) == "GPU 2 (MI300X)"
    gpu.reset_clock()
    open_address("0000:20:00.0").reset_clock()  # as in another process, which sees all GPUs
    assert amd_node == 2 * [(2, "reset_gpu_locked_clocks")]
    assert "HIP_VISIBLE_DEVICES" not in os.environ
    # Newer versions of Zeus have another method.
    gpu._zeus.reset_locked_clocks = lambda: amd_node.append((2, "reset_locked_clocks"))
    gpu.reset_clock()
    assert amd_node[-1] == (2, "reset_locked_clocks")


def test_an_amd_gpu_is_locked_at_one_clock_of_its_range(amd_node):
    gpu = open_address("0000:20:00.0")
    clocks_mhz = gpu.supported_clocks_mhz()
    assert (clocks_mhz[0], clocks_mhz[1], clocks_mhz[-1]) == (500, 525, 2100)
    gpu.lock_clock(1200)
    with pytest.raises(GpuError, match="1201 MHz is not one of its clocks"):
        gpu.lock_clock(1201)
    assert amd_node == [(2, (1200, 1200))]


def test_energy_and_power_of_an_amd_gpu_are_in_joules_and_watts(amd_node):
    gpu = open_address("0000:20:00.0")
    assert gpu.energy_j() == 1236.5
    assert gpu.power_w() == 487.25
    amd_node.has_instant_power = False  # as on MI210
    assert gpu.power_w() == 300.5


def test_the_library_of_an_amd_gpu_stays_open_while_the_gpu_is_used(amd_node):
    gpu = open_address("0000:20:00.0")
    gc.collect()
    assert amd_node.open_managers == 1
    del gpu
    gc.collect()
    assert amd_node.open_managers == 0


def test_both_dies_of_an_mi250x_have_the_one_reading_of_their_card(amd_node):
    amd_node.name = "AMD Instinct MI250X"
    dies = [open_address(f"0000:{16 * number:02x}:00.0") for number in range(4)]
    assert [with_energy(die).energy_j() for die in dies] == [1234.5, 1234.5, 1236.5, 1236.5]
    assert [die.power_w() for die in dies] == [487.25] * 4
    assert [die.counter for die in dies] == 2 * ["zeus:0000:00:00.0"] + 2 * ["zeus:0000:20:00.0"]
    assert str(GpuSettings(**dies[1].settings)).endswith("energy of whole modules")
    dies[1].reset_clock()
    assert amd_node == [(1, "reset_gpu_locked_clocks")], "each die has a clock of its own"


def test_an_amd_gpu_of_one_die_shares_no_counter(amd_node):
    gpu = open_address("0000:30:00.0")
    assert (gpu.counter, gpu.settings, gpu.energy_j()) == ("", None, 1237.5)


def test_a_clock_that_amd_does_not_report_is_no_reading(amd_node):
    gpu = open_address("0000:20:00.0")
    assert gpu.clock_mhz() == 1700
    amd_node.clock = "N/A"
    with pytest.raises(GpuError, match=r"Reading the clock of GPU 2 \(MI300X\) failed: the driver reports 'N/A'"):
        gpu.clock_mhz()
