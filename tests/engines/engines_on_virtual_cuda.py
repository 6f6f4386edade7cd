"""Engines of one rank on a stand-in for CUDA in virtual time, which also captures graphs."""

import torch
from virtual.agent import clocks_of
from virtual.cuda import VirtualCuda, wait_for_event
from virtual.gpu import RecordingGpu
from virtual.job import WorkerAtOnce
from virtual.time import VirtualTime

from perseus_ds.client import meeting, runtime
from perseus_ds.client.meeting import complete
from perseus_ds.client.timers import CudaExecution
from perseus_ds.protocol.job_messages import JobDescription, encode
from perseus_ds.protocol.messages import ServerStarted
from perseus_ds.server.job import Job
from perseus_ds.server.server import JobServer


def cuda_of_engines(monkeypatch):
    """Make the runtimes of engines use such a stand-in, and return it."""
    time = VirtualTime()
    gpu = RecordingGpu.named("a100-sxm", timebase=time, counter_period_s=0.02, lock_latency_s=0.002)
    cuda, device = VirtualCuda(time, gpu), torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.CUDAGraph)

    def meet(config, training, opened):
        """Does the work of :func:`perseus_ds.client.meeting.meet`, with a server in this process."""
        opened.device, opened.schedule, opened.gpu = training.device(), training.read(), gpu
        opened.facts = complete(training.facts(), config, opened.schedule, gpu)
        opened.timers = CudaExecution(device, cuda, wait_for_event)
        training.check(opened.schedule)
        opened.clocks = clocks_of(gpu, time, cuda, lambda message: (server.receive(0, message), server.tick()))
        description = JobDescription.of(config.model_dump_json().encode(), [opened.facts])
        send = lambda rank, message: opened.clocks._link.agent.receive_from_server(message)  # noqa: E731
        server = JobServer(Job.of(description), send, timebase=time, worker=WorkerAtOnce)
        server.start()
        return ServerStarted("virtual", answer=encode(server.welcome()))

    monkeypatch.setattr(runtime, "meet", meet)
    for waits in (runtime.PerseusRuntime.__init__, meeting.measure_gpu):
        monkeypatch.setitem(waits.__kwdefaults__, "timebase", time)
    return cuda


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, cuda, seconds):
        ctx.cuda, ctx.seconds = cuda, seconds
        cuda.launch(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradients):
        ctx.cuda.launch(2 * ctx.seconds)
        return gradients, None, None


def launched(outputs, cuda, seconds):
    """Return outputs of a layer that takes ``seconds``, and twice as long in the backward."""
    return _Launch.apply(outputs, cuda, seconds)
