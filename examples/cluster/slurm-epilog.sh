#!/bin/bash
# Slurm's Prolog and Epilog (slurm.conf), which run as root on each node before and after a job. Slurm kills a job's
# processes together, Perseus's guardians among them, so the node itself must see to the clocks.
if [[ -n "${SLURM_JOB_GPUS:-}" ]]; then
    /usr/bin/nvidia-smi --id="$SLURM_JOB_GPUS" --reset-gpu-clocks
fi
exit 0 # anything else would drain the node
