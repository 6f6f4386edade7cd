"""Memory files with a Python that lacks their functions and constants, such as conda's."""

import os
import platform

import pytest

from perseus_ds.client.lease import SharedMemory
from perseus_ds.errors import GpuError

OLDER_PYTHON = """
import fcntl, os
names = [(os, name) for name in dir(os) if name.startswith(("memfd_", "MFD_"))]
names += [(fcntl, name) for name in dir(fcntl) if name.startswith("F_SEAL_") or name.endswith("_SEALS")]
for module, name in names:
    delattr(module, name)
"""
USE = """
import os
from perseus_ds.client.lease import Lease, SharedMemory
from perseus_ds.gpu.nvml import NvmlGpu
memory = SharedMemory(100)
memory.view[:3] = b"abc"
print(hasattr(os, "memfd_create"), os.pread(memory.file, 3, 0))
try:
    os.ftruncate(memory.file, 0)
except PermissionError:
    print("sealed")
print(Lease(NvmlGpu(0).address, "a job").close(600.0))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64", "ppc64le"), reason="the number of the system call")
def test_a_python_without_memory_files_shares_sealed_memory_with_the_agent(stub_nvml, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OLDER_PYTHON)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = stub_nvml.run("-c", USE, environment={"PYTHONPATH": path})
    assert done.stdout.splitlines() == ["False b'abc'", "sealed", "True"], done.stderr


def test_on_an_unknown_machine_the_error_names_what_is_missing(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(GpuError, match="its number on vax is not known"):
        SharedMemory(100)
