"""``make test-gpu``: runs the checks on a GPU.

Without a GPU, a single line gives the reason why they are skipped.

Arguments select checks by name, which run in the order of :data:`gpu_checks.checks.CHECKS`:
``python tests/gpu_checks/run.py spans requests``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "gpu"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]


def main(chosen: list[str], folder: Path = FOLDER) -> int:
    """Run the checks, and write all results, including earlier ones, after each of them."""
    from gpu_checks.checks import CHECKS, made_in_a_process
    from gpu_checks.machine import why_no_gpu

    if unknown := sorted(set(chosen) - set(CHECKS)):
        print(f"make test-gpu: there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}.")
        return 2
    if reason := why_no_gpu():
        print(f"make test-gpu: skipped, {reason}.")
        return 0
    failed = 0
    for name, check in CHECKS.items():
        if not chosen or name in chosen:
            print(f"{check.title} ...", flush=True)
            result = made_in_a_process(name, folder / "checks")
            failed += result.outcome != "passed"
            print(f"  {result.outcome} in {result.took_s:.0f} s{f': {result.reason}' if result.reason else ''}")
            write_evidence(folder)
    return int(failed > 0)


def write_evidence(folder: Path) -> None:
    """Write the results of all checks on this machine, and an HTML page with them."""
    from gpu_checks.checks import collected

    from perseus_ds.report.page import evidence_page

    evidence = collected(folder / "checks")
    if evidence is not None:
        evidence.save(folder)
        (folder / "evidence.html").write_text(evidence_page(evidence), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
