#!/usr/bin/env bash
# GPU hosts of any Kubernetes cluster that has JobSet (kubectl).
#
#   NAME=mine IMAGE=registry/jaxllm:1 HOSTS=4 VOLUME=shared tpu_scripts/jobset.sh VERB [--dry-run] [-- COMMAND]
#
#   setup      installs the JobSet controller of version VERSION
#   run        runs `-- train RECIPE ...`, one process per host
#   status     lists the pods
#   logs       follows the log of the first host
#   profile    profiles the next three steps on every host (SIGUSR2)
#   stop       deletes the JobSet: its hosts get SIGTERM, save a checkpoint and exit
#
# GPUS (8): GPUs per host.  VOLUME: persistent volume claim that all hosts can write, mounted at /runs (use --out /runs).
# RESTARTS (50): how often all hosts are restarted.  GRACE (120): seconds that they have to save.
# EXCLUDE: nodes that no host runs on, such as node3,node7.  SPARES (0): hosts that are held in addition, and take the
# place of lost ones; needs `train RECIPE --elastic`, with which a lost host is replaced alone, up to RESTARTS times.

# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
if [[ "$verb" == help ]]; then help && exit; fi

need_name() {
  : "${NAME:?the name of the JobSet}"
}

# Arguments as a JSON list, which is valid YAML too.
listed() {
  python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
}

# Affinity of pods that keeps them off the excluded nodes.
excluded() {
  if [[ -z "${EXCLUDE:-}" ]]; then return; fi
  local nodes
  IFS=, read -r -a nodes <<<"$EXCLUDE"
  cat <<END
            affinity:
              nodeAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                  nodeSelectorTerms:
                  - matchExpressions:
                    - {key: kubernetes.io/hostname, operator: NotIn, values: $(listed "${nodes[@]}")}
END
}

jobset() {
  local words=("${command[@]}") pods=$((HOSTS + ${SPARES:-0})) replaced=0 affinity
  affinity=$(excluded)${EXCLUDE:+$'\n'}
  if is_elastic; then
    mapfile -d '' -t words < <(supervised)
    replaced=${RESTARTS:-50}
  fi
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
spec:
  failurePolicy:
    maxRestarts: ${RESTARTS:-50}
  replicatedJobs:
  - name: host
    replicas: 1
    template:
      spec:
        parallelism: $pods
        completions: $pods
        completionMode: Indexed
        backoffLimit: $replaced
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: ${GRACE:-120}
$affinity            containers:
            - name: jaxllm
              image: $IMAGE
              command: $(listed python -m jaxllm.cli "${words[@]}")
              env:
              - {name: NNODES, value: "$pods"}
              - name: JOBSET_NAME
                valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}
              - name: REPLICATED_JOB_NAME
                valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']"}}
              resources:
                limits: {nvidia.com/gpu: "${GPUS:-8}"}
              volumeMounts:
              - {name: runs, mountPath: /runs}
              - {name: shm, mountPath: /dev/shm}
            volumes:
            - {name: runs, persistentVolumeClaim: {claimName: "$VOLUME"}}
            - {name: shm, emptyDir: {medium: Memory}}
END
}

case "$verb" in
  setup)
    : "${VERSION:?the version of JobSet, such as v0.8.0}"
    run kubectl apply --server-side -f "https://github.com/kubernetes-sigs/jobset/releases/download/$VERSION/manifests.yaml"
    ;;
  run)
    need_name
    need_command
    : "${IMAGE:?the image with jax[cuda13] and jaxllm}" "${HOSTS:?the number of hosts}" "${VOLUME:?the volume claim}"
    check_spares
    run_with "$(jobset)" kubectl apply -f -
    ;;
  status)
    need_name
    run kubectl get pods --selector "jobset.sigs.k8s.io/jobset-name=$NAME"
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
  stop)
    need_name
    run kubectl delete jobset "$NAME"
    ;;
  *)
    help >&2
    exit 2
    ;;
esac
