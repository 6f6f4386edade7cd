"""Every exception a user of perseus-ds can see."""


class PerseusError(Exception):
    """Base of all errors that perseus-ds raises on purpose."""


class ConfigError(PerseusError, ValueError):
    """The ``perseus`` block, a command's arguments, or what they point to, is wrong."""


class ProfileError(PerseusError, ValueError):
    """A profile (``profile.csv``, ``profile.json``) cannot be used."""


class ScheduleError(PerseusError, ValueError):
    """A pipeline schedule cannot be turned into a DAG: deadlock, or a transfer without a partner."""


class FrontierError(PerseusError, ValueError):
    """A frontier or plan file cannot be used as it is."""


class PlanError(PerseusError, ValueError):
    """A frequency plan does not fit the schedule or the GPU it is meant for."""


class SignalError(PerseusError, ValueError):
    """The file of a signal (a price, a carbon intensity, a power cap over time) cannot be used."""


class DeadlineError(PerseusError, ValueError):
    """No plan is as fast as requested."""


class GpuError(PerseusError, RuntimeError):
    """The GPU or its driver refused something."""


class GpuPermissionError(GpuError):
    """This process may not change the GPU's clocks."""


class GpuBusyError(GpuError):
    """The driver did not do what was asked of it now, and may do it later."""


class ConnectionLostError(PerseusError, RuntimeError):
    """A connection between ranks is lost."""


class VersionError(PerseusError, ImportError):
    """The installed DeepSpeed, torch or Megatron-Core is not one that Perseus works with."""
