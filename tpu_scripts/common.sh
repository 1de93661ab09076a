# shellcheck shell=bash
# Sourced by the scripts beside it: VERB [--dry-run] [-- COMMAND ...], settings from the environment.
set -euo pipefail

# Words as one line that a shell reads as the same words.
quoted() {
  local word line=""
  for word in "$@"; do
    if [[ ! "$word" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then word="${word@Q}"; fi
    line+=" $word"
  done
  printf '%s' "${line# }"
}

# Prints a command, and runs it unless --dry-run was given.
run() {
  printf '%s\n' "$(quoted "$@")"
  if [[ "$dry_run" == no ]]; then "$@"; fi
}

# The same for a command that reads its standard input from a text.
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
  echo "error: $(quoted "$1") is not --dry-run; what is to be run comes after --" >&2
  exit 2
fi
# What jaxllm is to do: train RECIPE --setting value ...
command=("$@")

need_command() {
  if [[ ${#command[@]} -eq 0 ]]; then
    echo "error: nothing to run: $verb [--dry-run] -- train RECIPE ..." >&2
    exit 2
  fi
}

# Prints the comment at the head of a script.
help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}
