"""Measurements published with the Perseus paper; see ``tests/data/sosp24/README.md``."""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "sosp24"


def stage_profile(gpu: str) -> Path:
    """Return the profile of GPT-3 175B on ``a100-sxm`` or ``a40``."""
    return _FOLDER / "stage_profile" / f"gpt3-175b_{gpu}.csv"


def lowtime_frontier(gpu: str, micro_batches: int) -> Path:
    """Return the frontier that lowtime planned for 12, 24, 48 or 96 micro-batches."""
    return _FOLDER / "lowtime_frontier" / f"gpt3-175b_{gpu}_mb{micro_batches}.csv"
