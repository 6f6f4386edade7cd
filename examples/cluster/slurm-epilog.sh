#!/bin/bash
# Slurm's Prolog and Epilog (slurm.conf), which run as root on each node before and after a job. Slurm kills a job's
# processes together, including Perseus's agents, so the node itself must reset the clocks.
# SLURM_JOB_GPUS contains the minor numbers of /dev/nvidia*. nvidia-smi numbers GPUs in another order, so it gets their PCI
# addresses, which are the names of the driver's folders.
gpus=()
for file in /proc/driver/nvidia/gpus/*/information; do
    minor=$(awk '/^Device Minor:/ { print $NF }' "$file" 2>/dev/null)
    if [[ -n "$minor" && ",${SLURM_JOB_GPUS:-}," == *",$minor,"* ]]; then
        gpus+=("$(basename "$(dirname "$file")")")
    fi
done
if [[ ${#gpus[@]} -gt 0 ]]; then
    /usr/bin/nvidia-smi --id="$(IFS=,; echo "${gpus[*]}")" --reset-gpu-clocks
fi
exit 0 # any other code would drain the node
