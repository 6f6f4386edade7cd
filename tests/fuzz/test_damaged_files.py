"""Damaged files, given to each command that reads them.

They must cause an error message or a result, but neither a traceback nor a hang.

`make test` runs a few fixed examples per file; `make fuzz` runs new ones for hours.
"""

import contextlib
import io
import os
import resource
import shutil
import signal
from pathlib import Path

import corpus
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus_ds.artifacts.evidence import Evidence
from perseus_ds.artifacts.frontier import Frontier, read_zeus
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.cli.main import command_of
from perseus_ds.errors import PerseusError
from perseus_ds.report.inputs import read_run

# `make test` runs few examples, always the same.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
_LONGEST_CPU_S = 10
_MOST_GROWTH_BYTES = 500 * 2**20
RUN, OUT = Path(corpus.FOLDER), Path("out")
PROFILE, FRONTIER = RUN / "profile.csv", RUN / "frontier.json"

_OPTIMIZE = ("optimize", {"profile": PROFILE, "out": OUT, "plans": 4})
_REPORT = ("report", {"run": RUN, "out": OUT / "report.html"})
_TRACE = ("trace", {"run": RUN, "out": OUT / "trace.json"})
_IMPORT = ("import", {"plans": Path("plans"), "profile": PROFILE, "out": OUT})
_PROFILE = [
    ("profile show", {"profile": PROFILE}),
    ("profile compare", {"profiles": (PROFILE, PROFILE)}),
    ("profile validate", {"profile": PROFILE}),
    ("profile merge", {"profiles": [PROFILE, PROFILE], "out": OUT}),
    ("profile convert", {"profile": PROFILE, "out": OUT}),
]
_PARTITION = ("partition", {"model": str(RUN)})
_STATUS = ("control status", {"run": RUN})
_WATCH = [("watch", {"run": RUN, "once": True, "json": as_json}) for as_json in (False, True)]
COMMANDS = {
    "run/profile.csv": [_OPTIMIZE, *_PROFILE, _IMPORT, _REPORT, _PARTITION],
    "run/profile.json": [_OPTIMIZE, *_PROFILE, _IMPORT, _REPORT, _PARTITION],
    "run/frontier.json": [("export", {"frontier": FRONTIER, "out": OUT}), _REPORT, _TRACE],
    "run/run.jsonl": [_REPORT, _TRACE, *_WATCH, ("compare", {"runs": [RUN], "out": OUT / "comparison.html"})],
    "run/timeline.json": [_REPORT, _TRACE, *_WATCH, _PARTITION],
    corpus.PLAN: [_IMPORT],
    corpus.CONTROL: [_STATUS],
    corpus.EVIDENCE: [("report", {"run": Path("evidence"), "out": OUT / "evidence.html"})],
}
# The same files without a command: hundreds per second.
READERS = {
    "run/profile.csv": StageProfile.load,
    "run/profile.json": lambda path: StageProfile.load(path.with_suffix(".csv")),
    "run/frontier.json": Frontier.load,
    "run/run.jsonl": read_run,
    "run/timeline.json": TimelineFile.load,
    corpus.PLAN: read_zeus,
    corpus.EVIDENCE: Evidence.load,
}
# Pictures take a second each, so only `make fuzz` makes them.
PICTURES = [
    ("plot", {"run": RUN, "out": OUT}),
    ("schedules", {"profile": PROFILE, "schedules": ["deepspeed_1f1b"], "plans": 4, "out": OUT}),
    ("profile show", {"profile": PROFILE, "out": OUT / "profile.png"}),
]


@pytest.fixture(scope="module")
def right_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    corpus.write_corpus(folder)
    return folder


@pytest.fixture
def folder(right_files, tmp_path, monkeypatch):
    """A copy of the corpus, as the current folder."""
    shutil.copytree(right_files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / OUT).mkdir()
    return tmp_path


def tries(share):
    """Return the number of examples to run: a share of those in the settings."""
    return max(1, int(SETTINGS.max_examples * share))


@contextlib.contextmanager
def bounded():
    """Fail if the body takes more processor time or memory than a damaged file may cost."""

    def stop(number, frame):
        raise AssertionError(f"it has not ended after {_LONGEST_CPU_S} s of processor time")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 <= _MOST_GROWTH_BYTES


def run(command, arguments):
    """Run a command as the command line does after parsing, and return its output or error."""
    printed = io.StringIO()
    try:
        with bounded(), contextlib.redirect_stdout(printed):
            command_of(command)(**arguments).execute()
    except PerseusError as error:
        return str(error)
    return printed.getvalue()


def test_the_corpus_is_right(folder):
    for commands in COMMANDS.values():
        for command, arguments in commands:
            if command != "control status":
                assert command_of(command)(**arguments).execute() == 0


@pytest.mark.parametrize("name", [name for name in corpus.FILES if name in COMMANDS])
def test_a_damaged_file_is_an_error_in_words_or_does_no_harm(folder, name):
    content = (folder / name).read_bytes()
    commands = [*COMMANDS[name], *PICTURES] if EXAMPLES and "run/" in name else COMMANDS[name]

    @settings(SETTINGS, max_examples=tries(0.2))
    @given(corpus.damaged(name, content), st.sampled_from(commands))
    def tried(changed, command):
        (folder / name).write_bytes(changed)
        assert len(run(*command)) < 100_000

    tried()


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_in_words_or_read(folder, name):
    path = folder / name

    @settings(SETTINGS, max_examples=tries(2))
    @given(corpus.damaged(name, path.read_bytes()))
    def tried(changed):
        path.write_bytes(changed)
        with bounded():
            try:
                READERS[name](path)
            except PerseusError as error:
                text = str(error)
            else:
                return
        assert text.startswith(str(path.parent))
        assert len(text) < 2_000

    tried()
