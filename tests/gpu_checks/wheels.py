"""``make wheels``: packages of the GPU checks, for a machine with torch but without network."""

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "annotated-types", "deepspeed", "einops", "hjson", "msgpack", "msgspec", "numpy", "nvidia-ml-py", "packaging",
    "platformdirs", "prometheus_client", "psutil", "pydantic", "pydantic_core", "pyzmq", "scipy", "tqdm",
    "typing-inspection",
)  # fmt: skip
"""Packages in addition to torch and its dependencies, installed without their own dependencies."""
MOST_BYTES = 64 * 2**20
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def pins_for(python: str) -> list[str]:
    """Return the pinned versions for a version of Python such as 3.12.

    Pins of ``requirements-pythons.lock`` replace those of ``requirements.lock``.
    """
    found = {}
    for name in ("requirements.lock", "requirements-pythons.lock"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if line.partition("==")[0] in NAMES:
                pin = Requirement(line)
                if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                    found[pin.name] = f"{pin.name}{pin.specifier}"
    return list(found.values())


def collect(folder: Path, python: str) -> None:
    """Collect the wheels for a version of Python in a folder."""
    pins = pins_for(python)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):  # of another version of Python, or of an earlier state of this package
        wheel.unlink()
    only = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    places = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    for pin in pins:
        # Some have only source distributions, in pure Python.
        download = [*pip, "download", *only, *places, "--dest", str(folder), pin]
        if subprocess.run(download, check=False, stderr=subprocess.DEVNULL).returncode:
            _build(pip, folder, pin)
    _build(pip, folder, str(ROOT))
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(pins) + 1} wheels for Python {python}, {size / 2**20:.1f} MiB, are in {folder}.")
    if size > MOST_BYTES:
        raise SystemExit(f"That is more than {MOST_BYTES >> 20} MiB.")


def _build(pip: list[str], folder: Path, what: str) -> None:
    before = set(folder.glob("*.whl"))
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), what]
    subprocess.run(["env", "DS_BUILD_OPS=0", *build], check=True)
    if other := [path.name for path in set(folder.glob("*.whl")) - before if not path.name.endswith("-none-any.whl")]:
        raise SystemExit(f"{what} has no wheel for that Python; {other[0]} is for the one that runs this.")


if __name__ == "__main__":
    collect(Path(sys.argv[1]), sys.argv[2])
