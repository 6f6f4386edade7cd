"""A world in virtual time, in which the real code of Perseus runs: hours of training pass in a minute, always alike.

It has three concepts, each a module:

- ``virtual.time``: :class:`VirtualTime`, a timebase (``perseus_ds.timebase``) in which time passes only when all
  threads wait. Whatever takes a ``timebase`` can live in it.
- ``virtual.gpu``: GPUs that live in it. :class:`RecordingGpu` records which clocks were set and when,
  :class:`FaultyGpu` has a driver that misbehaves while a test wants it to, and :class:`VirtualCuda` is a stream on
  which passes are only launched, as on CUDA.
- ``virtual.job``: :class:`VirtualJob`, a training job of one rank or of a pipeline of ranks. Every rank runs the real
  ``PerseusRuntime`` on a simulated GPU; only the engine is missing: passes take the time that ``work_s`` says.

``virtual.hostile_day`` lets random faults happen to such a job.

A test makes a job with a ``perseus`` block, trains it until something has happened, changes what passes take or what
the GPU does, and looks at the records, at the clocks or at what was printed::

    def test_a_plan_that_saves_nothing_is_dropped(start):     # ``start`` of tests/server/conftest.py ends the job
        job = start(mode="auto")                              # one rank: 3 micro-batches of 0.1 s and 0.2 s
        job.train_until("run")                                # profiles, plans, and is about to run its first plan
        job.late_under_plans()                                # from now on all passes take longer under plans
        job.train(60)                                         # returns the phase of each iteration
        job.close()
        assert not job.events(PlanJudged)[0].kept

Nothing here reads the wall clock, so a test never depends on how fast the machine is.
"""
