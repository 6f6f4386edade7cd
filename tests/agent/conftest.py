"""The agent of a rank in virtual time, whose test defines ``clocks``."""

import pytest


@pytest.fixture
def told():
    """Messages from the agent to the server."""
    return []


@pytest.fixture
def agent(clocks):
    return clocks._link.agent
