"""Marks written by the GPU in stream order, in graphs and on several devices, on the stub of CUDA's driver."""

import fcntl
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from run_log import wait_until
from stub_cuda.controller import TorchCuda

from perseus_ds.client.lease import SharedMemory
from perseus_ds.client.marks import HIP, StreamMarks, StreamWrites
from perseus_ds.client.operations import CapturedIteration
from perseus_ds.client.timers import GraphTimes
from perseus_ds.errors import GpuError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol import layout
from perseus_ds.protocol.layout import RankMemory


@pytest.fixture
def memory():
    return SharedMemory(4096)


@pytest.fixture
def words(memory):
    return np.frombuffer(memory.view, np.uint32)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ({"register": 2}, "mapping the shared memory failed with CUDA_ERROR_OUT_OF_MEMORY"),
        ({"write": 801}, "writing a mark failed with CUDA_ERROR_NOT_SUPPORTED"),
        ({"write": 12345}, "writing a mark failed with error 12345"),
    ],
)
def test_a_driver_that_refuses_is_named_with_its_error(stub_cuda, memory, fails, message):
    stub_cuda.fail(**fails)
    with pytest.raises(GpuError, match=message):
        StreamWrites(memory).write(stub_cuda.stream, 0, 1)


def test_a_missing_library_is_an_error_that_says_what_is_needed(memory):
    with pytest.raises(GpuError, match=r"CUDA 11\.7 or later, or HIP, is needed"):
        StreamWrites(memory, HIP)


def test_the_memory_is_seen_by_another_process_and_can_be_neither_shrunk_nor_grown(memory, words):
    words[5] = 17
    script = "import mmap, sys; print(mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ)[20])"
    command = [sys.executable, "-c", script, str(memory.file)]
    read = subprocess.run(command, pass_fds=[memory.file], capture_output=True, check=True, text=True)
    assert read.stdout == "17\n"
    for length in (0, 2 * memory.length):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.file, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert memory.length % mmap.PAGESIZE == 0


def test_memory_that_the_system_does_not_have_is_an_error_at_once(monkeypatch):
    def full(file, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(GpuError, match="4 KiB of shared memory: No space left on device"):
        SharedMemory(100)


@pytest.fixture
def shared():
    return SharedMemory(layout.LENGTH)


def test_marks_of_an_iteration_arrive_in_the_order_of_the_stream(stub_cuda, shared):
    memory = RankMemory.create(shared.view)
    marks = StreamMarks(StreamWrites(shared), 0, TorchCuda(stub_cuda), lambda device: stub_cuda.stream)
    marks.check(memory)
    assert memory.ended == 0
    memory.slots[5], memory.slots[6] = 1.5, 2.5  # of the previous iteration, which had more positions
    marks.begin(7, positions=3)
    for slot in range(2):
        marks.mark(slot)
    with stub_cuda.busy():
        marks.mark(2)
        marks.end(7)
        wait_until(lambda: memory.marked_s(1) is not None, "the marks before the kernel")
        assert [memory.marked_s(slot) is not None for slot in range(6)] == [True, True, False, False, False, False]
        assert (memory.begun, memory.ended) == (7, 0)
    stub_cuda.synchronize()
    assert memory.marked_s(2) is not None
    assert memory.ended == 7
    assert memory.slots[6] == 2.5, "only its own marks are cleared"


def test_a_gpu_whose_marks_do_not_arrive_is_an_error(stub_cuda, shared):
    elsewhere = RankMemory.create()
    marks = StreamMarks(StreamWrites(shared), 0, TorchCuda(stub_cuda), lambda device: stub_cuda.stream)
    with pytest.raises(GpuError, match="A mark that GPU 0 wrote did not arrive in shared memory"):
        marks.check(elsewhere)


FORWARDS = [Compute(Instruction(0, Kind.FORWARD, number)) for number in range(3)]


def test_a_captured_iteration_marks_and_times_its_passes_in_each_replay_on_any_stream_of_its_device(stub_cuda, shared):
    memory, device = RankMemory.create(shared.view), 1
    stub_cuda.set_device(device)
    cuda = TorchCuda(stub_cuda, device)
    with stub_cuda.using(stub_cuda.new_stream(device)):
        marks = StreamMarks(StreamWrites(shared), device, cuda, lambda of: stub_cuda.stream)
        times = GraphTimes(stub_cuda.event)
        captured = CapturedIteration(marks, times)

        def passes():
            for number, forward in enumerate(FORWARDS):
                with captured.operation(forward):
                    stub_cuda.delay(0.002 * (number + 1))

        with stub_cuda.using(stub_cuda.new_stream(device)):
            graph = stub_cuda.captured(passes)
        stub_cuda.synchronize()
        assert marked(memory) == [False] * 6, "capturing executes nothing"
        for iteration in (1, 2):
            with stub_cuda.busy():
                marks.begin(iteration, positions=3)
                graph.replay()
                marks.end(iteration)
                assert (memory.begun, marked(memory)) == (iteration - 1, [iteration > 1] * 6), "the stream is busy"
            assert (memory.begun, memory.ended, marked(memory)) == (iteration, iteration, [True] * 6)
            for number, (_, begun, ended) in enumerate(times.marks):
                assert begun.elapsed_time(ended) / 1e3 >= 0.002 * (number + 1)
            assert captured.instructions == [forward.instruction for forward in FORWARDS]


def test_marks_of_a_graph_on_a_stream_of_another_device_are_an_error_while_it_is_captured(stub_cuda, shared):
    marks = StreamMarks(StreamWrites(shared), 0, TorchCuda(stub_cuda), lambda of: stub_cuda.stream)
    captured = CapturedIteration(marks, GraphTimes(stub_cuda.event))
    stub_cuda.set_device(1)
    with pytest.raises(GpuError, match="CUDA_ERROR_INVALID_HANDLE"), captured.operation(FORWARDS[0]):
        pass


def marked(memory):
    return [memory.marked_s(slot) is not None for slot in range(6)]
