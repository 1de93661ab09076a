#!/usr/bin/env bash
# TPU VMs of Compute Engine, one slice or several (gcloud).
#
#   NAME=mine PROJECT=my-project ZONE=us-east5-b TYPE=v6e-16 tpu_scripts/tpu_vm.sh VERB [--dry-run] [-- COMMAND]
#
#   create     requests the slices as a queued resource, which waits until they are available
#   status     shows the request
#   sync       copies the committed files of this repository to every host
#   setup      installs Python and jaxllm on every host, from those files
#   run        runs `-- train RECIPE ...` on every host, in the background, under a supervisor
#   logs       follows the log of the first host
#   profile    profiles the next three steps (SIGUSR2)
#   fetch      copies RUN_DIR of the first host to runs/
#   stop       saves a checkpoint and ends the run (SIGTERM)
#   teardown   deletes the slices
#
# SLICES (1): number of slices.  SPOT=yes: preemptible capacity.  RUNTIME: VM image, by default that of TYPE.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

: "${NAME:?the name of the TPU}" "${PROJECT:?the project of Google Cloud}" "${ZONE:?the zone}"
slices="${SLICES:-1}"
where=(--project "$PROJECT" --zone "$ZONE")
nodes=("$NAME")
if [[ "$slices" -gt 1 ]]; then
  mapfile -t nodes < <(seq -f "$NAME-%g" 0 "$((slices - 1))")
fi

on_all() {
  for node in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker all --command "$1"
  done
}

case "$verb" in
  create)
    : "${TYPE:?the kind of slice, such as v6e-16}"
    case "$TYPE" in
      v4-*) image=tpu-ubuntu2204-base ;;
      v5litepod-*) image=v2-alpha-tpuv5-lite ;;
      v5p-*) image=v2-alpha-tpuv5 ;;
      v6e-*) image=v2-alpha-tpuv6e ;;
      *) image="${RUNTIME:?the image of a $TYPE}" ;;
    esac
    which=(--node-id "$NAME")
    if [[ "$slices" -gt 1 ]]; then which=(--node-count "$slices" --node-prefix "$NAME"); fi
    if [[ "${SPOT:-no}" == yes ]]; then which+=(--spot); fi
    run gcloud compute tpus queued-resources create "$NAME" "${where[@]}" "${which[@]}" \
      --accelerator-type "$TYPE" --runtime-version "${RUNTIME:-$image}"
    ;;
  status)
    run gcloud compute tpus queued-resources describe "$NAME" "${where[@]}"
    ;;
  sync)
    run mkdir -p build
    run git archive --output build/jaxllm.tar.gz HEAD
    for node in "${nodes[@]}"; do
      run gcloud compute tpus tpu-vm scp build/jaxllm.tar.gz "$node:jaxllm.tar.gz" "${where[@]}" --worker all
    done
    on_all 'mkdir -p jaxllm && tar -xzf jaxllm.tar.gz -C jaxllm'
    ;;
  setup)
    # The images have an older Python; uv installs a newer one.
    on_all 'python3 -m pip install --user uv && .local/bin/uv venv --python 3.12 .venv'
    on_all '.local/bin/uv pip install --python .venv/bin/python -e jaxllm[tpu]'
    ;;
  run)
    need_command
    words="$(quoted .venv/bin/jaxllm launch supervise -- "${command[@]}")"
    on_all "nohup $words >> jaxllm.log 2>&1 < /dev/null & echo \$! > jaxllm.pid"
    ;;
  logs)
    run gcloud compute tpus tpu-vm ssh "${nodes[0]}" "${where[@]}" --worker 0 --command 'tail -n 100 -f jaxllm.log'
    ;;
  profile)
    # shellcheck disable=SC2016  # expanded there, not here
    on_all 'kill -USR2 "$(cat jaxllm.pid)"'
    ;;
  fetch)
    run mkdir -p runs
    run gcloud compute tpus tpu-vm scp --recurse "${nodes[0]}:${RUN_DIR:?the directory of the run}" runs/ \
      "${where[@]}" --worker 0
    ;;
  stop)
    # shellcheck disable=SC2016  # expanded there, not here
    on_all 'kill -TERM "$(cat jaxllm.pid)"'
    ;;
  teardown)
    run gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
