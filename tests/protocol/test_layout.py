"""Memory is refused if it has another layout, or if its owner could truncate it."""

import os
import socket

import pytest

from perseus_ds.agent.process import Agent
from perseus_ds.client.lease import SharedMemory
from perseus_ds.errors import GpuError
from perseus_ds.protocol import layout, messages, places
from perseus_ds.protocol.layout import RankMemory


def test_each_side_reads_what_the_other_one_writes_and_marks_of_cpu_and_gpu():
    shared = SharedMemory(layout.LENGTH)
    client, agent = RankMemory.create(shared.view), RankMemory(shared.view)
    agent.heartbeat_s = 2.5
    number = client.begin_iteration(7)
    assert (number, agent.iteration, agent.program(number), agent.begun) == (1, 1, 7, 0)
    client.mark_begun(number, 2.0, positions=3)
    client.slots[4] = 2.5
    assert (agent.begun, agent.begun_s) == (1, 2.0)
    assert [agent.marked_s(slot) for slot in (3, 4)] == [None, 2.5]
    shared.view[layout.MARKS_OFFSET + 8 * 3] = 1  # as a GPU writes it
    assert agent.marked_s(3) == pytest.approx(0.0, abs=1e-300)
    client.mark_ended(number, 3.0)
    client.end_iteration()
    assert (agent.ended, agent.ended_s, agent.progress) == (1, 3.0, 2)
    client.mark_begun(client.begin_iteration(), 3.0, positions=3)
    assert [agent.marked_s(slot) for slot in range(6)] == [None] * 6, "an iteration begins without marks"
    assert client.heartbeat_s == 2.5
    client.begin_iteration()
    assert (client.progress, client.iteration) == (5, 3), "it continues although the end of an iteration is missing"


@pytest.mark.parametrize("content", [b"", b"x" * layout.LENGTH])
def test_memory_of_another_layout_is_an_error(content):
    expected = f"version {layout.VERSION} and 135168 bytes"
    with pytest.raises(GpuError, match=f"damaged or of another version: expected .* {expected}"):
        RankMemory(memoryview(bytearray(content)))


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSEUS_RUNTIME_DIR", str(tmp_path))
    return Agent("name", open_gpu=lambda gpu: pytest.fail(f"{gpu} was opened"))


def answer(agent, packet, file=None):
    """Send a packet to an agent, with the file of a memory, and return its answer."""
    with places.connect("name") as connection, open(os.devnull, "rb") as signals:
        socket.send_fds(connection, [packet], [] if file is None else [file, signals.fileno()])
        for _ in range(2):
            agent.step()
        return messages.decode_to_client(connection.recv(messages.LONGEST))


def test_an_agent_refuses_memory_that_can_be_truncated_or_is_too_short(agent):
    file = os.memfd_create("unsealed")
    os.truncate(file, layout.LENGTH)
    request = messages.encode(messages.RequestLease("nvml:GPU-1"))
    refused = answer(agent, request, file)
    assert refused.reason == "memory"
    assert refused.error == "The memory of a rank can be truncated, or has only 135168 bytes."
    damaged = SharedMemory(layout.LENGTH)
    assert "damaged or of another version" in answer(agent, request, damaged.file).error


def test_an_agent_refuses_what_is_no_address_or_no_message(agent):
    request = messages.encode(messages.RequestLease("../../etc/passwd"))
    assert "is not the address of a GPU" in answer(agent, request, SharedMemory(layout.LENGTH).file).error
    assert "cannot decode a message" in answer(agent, b"\x81" * 500).error


def test_an_agent_receives_messages_whatever_the_number_of_open_files(agent, monkeypatch):
    monkeypatch.setattr("perseus_ds.agent.process._FD_SETSIZE", 0)  # as if its files had large numbers
    request = messages.encode(messages.RequestLease("../../etc/passwd"))
    assert "is not the address of a GPU" in answer(agent, request, SharedMemory(layout.LENGTH).file).error
