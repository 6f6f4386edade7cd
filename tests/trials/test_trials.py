"""No clock stays locked in some of the trials of ``make trials``."""

import pytest
from trials.scenarios import LIGHT
from trials.trial import NotPossibleError, attempt

pytestmark = [pytest.mark.integration, pytest.mark.extended]
# tests/agent/test_agent_processes.py has others, and tests/integration/test_clocks_are_restored.py some with launchers.
CHOSEN = {
    "SIGHUP to all ranks",
    "SIGKILL to one rank, with loader workers",
    "SIGKILL to the process group",
    "SIGTERM to the process group, profiling",
    "a rank ends: exec",
    "the agent; when replaced, all ranks",
    "the agent and all at once",
    "the agent and all at once, records of locked clocks too",
}


@pytest.mark.parametrize("scenario", [each for each in LIGHT if each.name in CHOSEN], ids=lambda each: each.name)
def test_no_clock_stays_locked(scenario, stub_library, tmp_path):
    try:
        outcome = attempt(scenario, stub_library, tmp_path / "trial", seed=0)
    except NotPossibleError as error:
        pytest.skip(str(error))
    assert outcome.locked, "no clock was locked, so nothing was tested"
    assert (outcome.restored_s is None) == scenario.ends_agent
    assert outcome.restored_s is not None or outcome.restored_later
