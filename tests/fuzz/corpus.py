"""Files of each format that a command reads, and damaged copies of them."""

import copy
import json
from pathlib import Path

from hypothesis import strategies as st
from run_folders import PLANS, make_evidence, make_job, write_auto_run

from perseus_ds.artifacts.frontier import export_zeus

FOLDER, PLAN, CONTROL = "run", "plans/freqs_pipeline_00003.py", "run/control.json"
EVIDENCE = "evidence/evidence.json"
FILES = (
    *(f"run/{name}" for name in ("profile.csv", "profile.json", "frontier.json", "run.jsonl", "timeline.json")),
    *(PLAN, CONTROL, EVIDENCE),
)

# Values that caused a traceback or a hang in some program that reads files.
HOSTILE = [
    *(None, True, "", -1, 0, 1, 2**31, 2**63, 10**9, 10**400, -(10**400), 0.5, -0.0, 5e-324, 1e-9, 1e15, 1e18, 1e300),
    *(float("inf"), float("nan"), [], {}, [[]], [{}], [None], {"": None}, "x" * 70_000, "\x00", "\x1b]0;title\x07"),
    *("\u202e", "../../../etc/passwd", "/dev/zero", "os:system", ":x", "..:x", "=1+1", "<script>", "%s%n", "1e400"),
    *("9" * 5000, "nan", "-inf", "1_000", "٣", "0x10", "1,5", '"', "'", ";", "\r", "\ufeff"),
]
_TEXTS = [
    *("9" * 5000, "1e400", "NaN", "null", "[" * 100_000, '{"a":' * 100_000, "-" * 10_000, "(" * 10_000, "\x00", "\r"),
    *('"\\ud800"', "\udc00", "\n", ",", '"', "'''", "\x1b[2J", "\u2028", "0" * 100, "." * 100, "#", "\t"),
]
BYTES = [b"", b"\x00", b"\xff\xfe", b"\x80", *(text.encode("utf-8", "surrogatepass") for text in _TEXTS)]


def write_corpus(folder: Path) -> None:
    """Write the valid files."""
    job = make_job()
    write_auto_run(folder / FOLDER, job)
    assert len(job.frontier.plans) > PLANS // 2
    export_zeus(job.frontier, folder / "plans")
    (folder / CONTROL).write_text(json.dumps({"socket": str(folder / "nobody.sock"), "pid": 1}) + "\n")
    (folder / EVIDENCE).parent.mkdir()
    make_evidence().save((folder / EVIDENCE).parent)


def damaged(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """Return copies of a file with a few changes."""
    ways = [_bytes_changed(content)]
    if name.endswith(".json"):
        ways.append(_json_changed(content))
    elif name.endswith(".jsonl"):
        ways.append(_lines_changed(content.splitlines(), _json_changed))
    elif name.endswith(".csv"):
        ways.append(_lines_changed(content.splitlines(), lambda line: _cells_changed(line.decode().split(","))))
    else:
        ways.append(_cells_changed(content.decode().split(",")))
    return st.one_of(*ways)


@st.composite
def _bytes_changed(draw: st.DrawFn, content: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from([0, 1, 4, 100, len(content)])))
        new = draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=8), st.just(content[start:end] * 2)))
        content = content[:start] + new + content[end:]
    return content


@st.composite
def _json_changed(draw: st.DrawFn, content: bytes) -> bytes:
    holder = [json.loads(content)]
    for _ in range(draw(st.integers(1, 2))):
        _change(draw, holder)
    return json.dumps(holder[0]).encode()


def _change(draw: st.DrawFn, holder: list | dict) -> None:
    """Change one value inside a list or an object."""
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not places:
            return
        key = draw(st.sampled_from(places))
        below = holder[key]
        if not (isinstance(below, list | dict) and below) or draw(st.integers(0, 7)) == 0:
            break
        holder = below
    match draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "add"])):
        case "remove" if len(places) > 1:
            del holder[key]
        case "repeat" if isinstance(holder, list):
            holder.extend(copy.deepcopy([below] * 3))
        case "add" if isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "x", "\x1b[2J", "plan"]))] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        case _:
            holder[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))


@st.composite
def _lines_changed(draw: st.DrawFn, lines: list[bytes], changed) -> bytes:
    lines = list(lines)
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = draw(changed(lines[index])) if draw(st.booleans()) else draw(st.sampled_from([*lines, *BYTES]))
        if lines[index] in BYTES:
            break
    return b"\n".join(lines) + b"\n"


@st.composite
def _cells_changed(draw: st.DrawFn, cells: list[str]) -> bytes:
    cells = list(cells)
    cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(HOSTILE)))[:6000]
    return ",".join(cells).encode("utf-8", "surrogatepass")
