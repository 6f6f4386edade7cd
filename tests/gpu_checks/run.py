"""``make test-gpu``: the checks on a GPU; where there is none, one line that says why they are skipped.

Words after it choose checks, as ``pytest -k`` does: ``python tests/gpu_checks/run.py "nvml or spans"``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]


def main() -> int:
    """Run the checks."""
    from gpu_checks.machine import why_no_gpu

    if reason := why_no_gpu():
        print(f"make test-gpu: skipped, {reason}.")
        return 0
    import pytest

    chosen = " ".join(sys.argv[1:])
    tests = str(Path(__file__).with_name("test_on_this_gpu.py"))
    return int(pytest.main([tests, "-m", "gpu", *(["-k", chosen] if chosen else [])]))


if __name__ == "__main__":
    sys.exit(main())
