"""The exceptions of perseus-ds that users can see."""


class PerseusError(Exception):
    """Base of all errors that perseus-ds raises on purpose."""


class ConfigError(PerseusError, ValueError):
    """The ``perseus`` block, a command's arguments or a file that they name is invalid."""


class ProfileError(PerseusError, ValueError):
    """A profile (``profile.csv``, ``profile.json``) is invalid or unsuitable."""


class ScheduleError(PerseusError, ValueError):
    """A pipeline schedule deadlocks or has an unmatched transfer."""


class FrontierError(PerseusError, ValueError):
    """A frontier or plan file is invalid or unsuitable."""


class PlanError(PerseusError, ValueError):
    """A frequency plan does not fit the schedule or the GPU."""


class DeadlineError(PerseusError, ValueError):
    """No plan meets the requested deadline."""


class GpuError(PerseusError, RuntimeError):
    """The GPU or its driver refused a request."""


class GpuPermissionError(GpuError):
    """This process may not change the GPU's clocks."""


class GpuBusyError(GpuError):
    """The driver did not execute a request but may do so later."""


class VersionError(PerseusError, ImportError):
    """The installed version of DeepSpeed, torch or Megatron-Core is not supported."""
