#!/bin/bash
# Slurm's Epilog (slurm.conf), which runs as root on each node of a job when the job has ended. Slurm kills a job's
# processes together, Perseus's guardian among them, so the node itself must see to the clocks.
if [[ -n "${SLURM_JOB_GPUS:-}" ]]; then
    /usr/bin/nvidia-smi --id="$SLURM_JOB_GPUS" --reset-gpu-clocks
fi
exit 0 # anything else would drain the node
