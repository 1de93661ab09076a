#!/usr/bin/env bash
# TPU slices of Google Kubernetes Engine, one or several (xpk).
#
#   NAME=mine CLUSTER=my-cluster PROJECT=my-project ZONE=us-east5-b TYPE=v6e-16 tpu_scripts/gke.sh VERB [--dry-run] [-- COMMAND]
#
#   create     creates the cluster and its slices
#   setup      configures kubectl for the cluster
#   run        runs `-- train RECIPE ...` on every host; the files of this directory are added to IMAGE
#   status     lists the workloads
#   logs       follows the log of the first host
#   profile    profiles the next three steps on every host (SIGUSR2)
#   exclude    keeps workloads off the node NODE from now on
#   include    lets them run there again
#   stop       deletes the workload: its hosts get SIGTERM, save a checkpoint and exit
#   teardown   deletes the cluster
#
# SLICES (1): number of slices.  SPARES (0): slices that the cluster holds in addition; when a node of a slice fails or is
# excluded, the workload restarts on one of them.  SPOT=yes: preemptible capacity.  IMAGE: image with Python 3.11,
# jax[tpu] and jaxllm's dependencies.  RESTARTS (50): how often Kubernetes restarts all hosts.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

: "${CLUSTER:?the name of the cluster}" "${PROJECT:?the project of Google Cloud}" "${ZONE:?the zone}"
where=(--cluster "$CLUSTER" --project "$PROJECT" --zone "$ZONE")

need_name() {
  : "${NAME:?the name of the workload}"
}

case "$verb" in
  create)
    tier=(--on-demand)
    if [[ "${SPOT:-no}" == yes ]]; then tier=(--spot); fi
    run xpk cluster create "${where[@]}" --tpu-type "${TYPE:?the kind of slice, such as v6e-16}" \
      --num-slices "$((${SLICES:-1} + ${SPARES:-0}))" "${tier[@]}"
    ;;
  setup)
    run gcloud container clusters get-credentials "$CLUSTER" --project "$PROJECT" --location "${ZONE%-*}"
    ;;
  run)
    need_name
    need_command
    run xpk workload create "${where[@]}" --workload "$NAME" --tpu-type "${TYPE:?the kind of slice, such as v6e-16}" \
      --num-slices "${SLICES:-1}" --max-restarts "${RESTARTS:-50}" \
      --base-docker-image "${IMAGE:?the image with jax[tpu] and the dependencies of jaxllm}" --script-dir . \
      --command "$(quoted python -m jaxllm.cli "${command[@]}")"
    ;;
  status)
    run xpk workload list "${where[@]}"
    ;;
  logs)
    need_name
    run kubectl logs --follow --selector "jobset.sigs.k8s.io/jobset-name=$NAME,batch.kubernetes.io/job-completion-index=0"
    ;;
  profile)
    need_name
    pods="kubectl get pods --selector jobset.sigs.k8s.io/jobset-name=$NAME --output name"
    run bash -c "$pods | xargs -I{} kubectl exec {} -- pkill -USR2 -f jaxllm.cli"
    ;;
  exclude)
    run kubectl cordon "${NODE:?the node}"
    ;;
  include)
    run kubectl uncordon "${NODE:?the node}"
    ;;
  stop)
    need_name
    run xpk workload delete "${where[@]}" --workload "$NAME"
    ;;
  teardown)
    run xpk cluster delete "${where[@]}"
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
