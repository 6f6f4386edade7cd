"""Some of the trials that ``make trials`` makes: no clock stays locked."""

import pytest
from trials.trial import NotPossibleError, attempt
from trials.ways import LIGHT

pytestmark = [pytest.mark.integration, pytest.mark.extended]
# One of each group; tests/integration/test_clocks_are_restored.py has some with launchers.
CHOSEN = {
    "SIGHUP to all ranks",
    "SIGKILL to one rank, with loader workers",
    "SIGKILL to the process group",
    "SIGTERM to the process group, profiling",
    "SIGTERM, on which the script goes on; SIGKILL",
    "a rank ends: segfault",
    "a rank ends: exec",
    "the first guardian; when replaced, all ranks",
    "all ranks are stopped; each guardian, when the other is replaced; all ranks",
    "both guardians and all at once",
    "both guardians and all at once, records of locked clocks too",
    "the job's cgroup, guardians in scopes",
}


@pytest.mark.parametrize("way", [way for way in LIGHT if way.name in CHOSEN], ids=lambda way: way.name)
def test_no_clock_stays_locked(way, stub_library, tmp_path):
    try:
        outcome = attempt(way, stub_library, tmp_path / "trial", seed=0)
    except NotPossibleError as error:
        pytest.skip(str(error))
    assert outcome.locked, "no clock was locked, so nothing was tested"
    assert (outcome.restored_s is None) == way.ends_guardians
    assert outcome.restored_s is not None or outcome.restored_later
