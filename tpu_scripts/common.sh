# shellcheck shell=bash
# Shared functions, sourced by the other scripts: VERB [--dry-run] [-- COMMAND ...], settings from the environment.
set -euo pipefail

# Quotes arguments as one line that a shell parses back into the same arguments.
quoted() {
  local word line=""
  for word in "$@"; do
    if [[ ! "$word" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then word="${word@Q}"; fi
    line+=" $word"
  done
  printf '%s' "${line# }"
}

# Prints a command, and runs it unless --dry-run is given.
run() {
  printf '%s\n' "$(quoted "$@")"
  if [[ "$dry_run" == no ]]; then "$@"; fi
}

# Like run, for a command whose standard input is the given text.
run_with() {
  local text="$1"
  shift
  printf "%s <<'END'\n%s\nEND\n" "$(quoted "$@")" "$text"
  if [[ "$dry_run" == no ]]; then "$@" <<<"$text"; fi
}

verb="${1:-help}"
shift || true
dry_run=no
if [[ "${1:-}" == --dry-run ]]; then
  dry_run=yes
  shift
fi
if [[ "${1:-}" == -- ]]; then
  shift
elif [[ $# -gt 0 ]]; then
  echo "error: unexpected argument $(quoted "$1"); legal: --dry-run, or -- and the command to run" >&2
  exit 2
fi
# Command of jaxllm to run: train RECIPE --setting value ...
command=("$@")

need_command() {
  if [[ ${#command[@]} -eq 0 ]]; then
    echo "error: no command to run: $verb [--dry-run] -- train RECIPE ..." >&2
    exit 2
  fi
}

# Whether the command goes on with the hosts left when one is lost.
is_elastic() {
  local word
  for word in "${command[@]}"; do
    if [[ "$word" == --elastic || "$word" == --elastic=* ]]; then return 0; fi
  done
  return 1
}

# Refuses held hosts that would never be used.
check_spares() {
  if [[ ! "${SPARES:-0}" =~ ^[0-9]+$ ]]; then
    echo "error: SPARES=$SPARES is no number of hosts" >&2
    exit 2
  fi
  if [[ "${SPARES:-0}" -gt 0 ]] && ! is_elastic; then
    echo "error: SPARES=$SPARES needs --elastic in the command: without it all hosts restart, and none takes a place" >&2
    exit 2
  fi
}

# Command of each host of a cluster: under a supervisor, which gets the number of held hosts.
supervised() {
  local spares=()
  if [[ "${SPARES:-0}" -gt 0 ]]; then spares=(--elastic.spares "$SPARES"); fi
  printf '%s\0' launch supervise "${spares[@]}" -- "${command[@]}"
}

# Prints the comment at the head of a script.
help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}
