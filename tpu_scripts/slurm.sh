#!/usr/bin/env bash
# GPU nodes under Slurm (sbatch).
#
#   NAME=mine NODES=4 tpu_scripts/slurm.sh VERB [--dry-run] [-- COMMAND]
#
#   setup      installs jaxllm into .venv of this directory, which all nodes share
#   run        runs `-- train RECIPE ...`, one process per node, each under a supervisor
#   status     shows the job
#   logs       follows the log
#   profile    profiles the next three steps (SIGUSR2)
#   stop       saves a checkpoint and ends the job (SIGTERM)
#
# GPUS (8): GPUs per node.  TIME (24:00:00): time limit, after which the job saves, ends and is requeued.
# PARTITION, ACCOUNT: passed to Slurm if set.  EXCLUDE: nodes that the job does not get, such as node3,node7.
# SPARES (0): nodes that are held in addition, and take the place of lost ones; needs `train RECIPE --elastic`, with which
# the job goes on when nodes are lost.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

need_name() {
  : "${NAME:?the name of the job}"
}

# Options of sbatch for settings that are set.
wishes() {
  if [[ -n "${PARTITION:-}" ]]; then echo "#SBATCH --partition=$PARTITION"; fi
  if [[ -n "${ACCOUNT:-}" ]]; then echo "#SBATCH --account=$ACCOUNT"; fi
  if [[ -n "${EXCLUDE:-}" ]]; then echo "#SBATCH --exclude=$EXCLUDE"; fi
  if is_elastic; then echo '#SBATCH --no-kill'; fi
}

job() {
  local words options=--kill-on-bad-exit=0
  mapfile -d '' -t words < <(supervised)
  if is_elastic; then options="--no-kill $options"; fi
  cat <<END
#!/usr/bin/env bash
#SBATCH --job-name=$NAME
#SBATCH --nodes=$((NODES + ${SPARES:-0}))
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=${GPUS:-8}
#SBATCH --exclusive
#SBATCH --time=${TIME:-24:00:00}
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$NAME.log
$(wishes)
srun $options $(quoted .venv/bin/jaxllm "${words[@]}")
status=\$?
# 143: stopped by a signal after saving. The job is requeued when its time ends; scancel removes it from the queue.
if [[ \$status -eq 143 ]]; then scontrol requeue "\$SLURM_JOB_ID"; fi
exit "\$status"
END
}

case "$verb" in
  setup)
    run python3 -m venv .venv
    run .venv/bin/pip install -e '.[cuda]'
    ;;
  run)
    need_name
    need_command
    : "${NODES:?the number of nodes}"
    check_spares
    run_with "$(job)" sbatch
    ;;
  status)
    need_name
    run squeue --name "$NAME"
    ;;
  logs)
    need_name
    run tail -n 100 -f "$NAME.log"
    ;;
  profile)
    need_name
    run scancel --name "$NAME" --signal USR2
    ;;
  stop)
    need_name
    run scancel --name "$NAME"
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
