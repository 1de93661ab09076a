#!/usr/bin/env bash
# Processes on this machine.
#
#   PROCESSES=4 tpu_scripts/local.sh VERB [--dry-run] [-- COMMAND]
#
#   run   `-- train RECIPE ...` in so many processes, started again together when one is lost
#
# DEVICES (0): of each process: CPU devices with JAX_PLATFORMS=cpu, else its share of the accelerators; 0: as jax finds.
# PYTHON (python3): of the environment that has jaxllm.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

case "$verb" in
  run)
    need_command
    run "${PYTHON:-python3}" -m jaxllm.cli launch local -n "${PROCESSES:?how many processes}" \
      --devices "${DEVICES:-0}" -- "${command[@]}"
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
