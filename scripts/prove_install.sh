#!/usr/bin/env bash
# Proves that `make install` needs no CUDA toolkit: runs it, as root, where the machine's own toolkit is out of sight.
# usage: prove_install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${DALI_TF_INPUT_HIDDEN:-}" ]; then
  exec env DALI_TF_INPUT_HIDDEN=1 unshare --mount bash "scripts/$(basename "$0")" "$@"  # what is mounted below is gone at the end
fi
for folder in $(readlink -e /usr/local/cuda* | sort -u); do mount -t tmpfs none "$folder"; done
IFS=: read -ra path <<<"$PATH"
for folder in "${path[@]}"; do
  if [ -e "$folder/nvcc" ]; then mount --bind /dev/null "$folder/nvcc"; fi  # no longer executable
done
echo "nvcc: $(nvcc --version 2>/dev/null || echo none); CUDA headers in /usr: $(find /usr -name 'cuda_runtime*.h' | wc -l)"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
make install VENV="$scratch/venv" PYTHON="${1:-python3}" PIP_NO_CACHE_DIR=1
