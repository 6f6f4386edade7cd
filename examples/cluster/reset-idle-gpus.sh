#!/bin/bash
# Resets the clocks of unused GPUs of this node, as root, for a systemd timer (reset-idle-gpus.service) or a DaemonSet
# (kubernetes-reset.yaml). It is needed if whole containers are killed, including agents.
# A GPU is unused if it has no process and less memory in use than a CUDA context takes.
set -u
used=$(nvidia-smi --query-compute-apps=gpu_uuid --format=csv,noheader) || exit 1
nvidia-smi --query-gpu=uuid,memory.used --format=csv,noheader,nounits | while IFS=', ' read -r uuid memory_mib; do
    if [[ "$used" != *"$uuid"* && "$memory_mib" =~ ^[0-9]+$ && "$memory_mib" -lt 100 ]]; then
        nvidia-smi --id="$uuid" --reset-gpu-clocks > /dev/null || echo "$uuid: its clock was not reset" >&2
    fi
done
