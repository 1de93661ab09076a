#!/usr/bin/env bash
# Several processes on this machine.
#
#   PROCESSES=4 tpu_scripts/local.sh VERB [--dry-run] [-- COMMAND]
#
#   run   runs `-- train RECIPE ...` in PROCESSES processes; all are restarted when one dies
#
# DEVICES (0): devices per process: CPU devices with JAX_PLATFORMS=cpu, else accelerators; 0: jax decides.
# PYTHON (python3): Python of the environment that has jaxllm.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

case "$verb" in
  run)
    need_command
    run "${PYTHON:-python3}" -m jaxllm.cli launch local -n "${PROCESSES:?the number of processes}" \
      --devices "${DEVICES:-0}" -- "${command[@]}"
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
