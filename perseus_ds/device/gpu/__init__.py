"""One GPU as perseus-ds needs it: NVML's or a simulated one."""
