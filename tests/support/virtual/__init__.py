"""Runs the real code of Perseus in virtual time: hours of training take a minute.

There are four concepts, each in a module:

- ``virtual.time``: :class:`VirtualTime`, a timebase (``perseus_ds.timebase``) in which time advances only when all
  threads wait. Anything with a ``timebase`` argument can use it.
- ``virtual.gpu``: GPUs in this time. :class:`RecordingGpu` records which clocks were set and when, and
  :class:`FaultyGpu` has a driver that fails while a test requires it.
- ``virtual.cuda``: :class:`VirtualCuda`, a stream on which passes are only launched, as with CUDA.
- ``virtual.job``: :class:`VirtualJob`, a training job of one rank or of a pipeline of ranks. Every rank runs a
  real ``Session`` and its runtime on a simulated GPU. Its engine computes nothing: passes take the times of ``work_s``.

A test makes a job with a ``perseus`` block, trains it until a condition holds, changes the times of passes or the
behaviour of the GPU, and checks the records, the clocks or the output::

    def test_a_plan_that_saves_nothing_is_dropped(start):     # ``start`` of tests/server/conftest.py ends the job
        job = start(mode="auto")                              # one rank: 3 micro-batches of 0.1 s and 0.2 s
        job.train_until("run")                                # profiles, plans, and is about to run its first plan
        job.late_under_plans()                                # from now on all passes take longer under plans
        job.train(60)                                         # returns the phase of each iteration
        job.close()
        assert not job.events(PlanJudged)[0].kept

Nothing here reads the wall clock, so tests are reproducible and do not depend on the speed of the machine.
"""
