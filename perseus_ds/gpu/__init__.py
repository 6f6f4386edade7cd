"""One GPU, through NVML, through Zeus or simulated."""
