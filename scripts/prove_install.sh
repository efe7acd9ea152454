#!/usr/bin/env bash
# Proves that `make install` needs no CUDA toolkit: runs it, as root, where the machine's own toolkit is out of sight.
# usage: prove_install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${DALI_TF_INPUT_HIDDEN:-}" ]; then
  exec env DALI_TF_INPUT_HIDDEN=1 unshare --mount bash "scripts/$(basename "$0")" "$@"  # what is mounted below is gone at the end
fi
for folder in $(readlink -f /usr/local/cuda* | sort -u); do mount -t tmpfs none "$folder"; done
while program=$(command -v nvcc); do
  mount --bind /dev/null "$(readlink -f "$program")"  # no longer executable
  hash -r
done
echo "nvcc: $(command -v nvcc || echo none); cuda_runtime_api.h: $(find / -xdev -name cuda_runtime_api.h -not -path '*/site-packages/*' 2>/dev/null | wc -l) outside wheels"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
make install VENV="$scratch/venv" PYTHON="${1:-python3}" PIP_NO_CACHE_DIR=1
