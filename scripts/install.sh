#!/usr/bin/env bash
# Sets up a virtual environment with TensorFlow, DALI, DALI's TensorFlow plugin, this package and its operator of DALI.
# usage: install.sh VENV [gpu] [dev] [nightly]
# On a bare Linux x86-64 machine with Python 3.10 to 3.13 and g++. No CUDA toolkit: CUDA's headers come as wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: install.sh VENV [gpu] [dev] [nightly]}
shift
python=${PYTHON:-python3}

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
say() { printf '\n== %s\n' "$*"; }
has() { case " $wanted " in *" $1 "*) true ;; *) false ;; esac; }
wanted=$*

[ "$(uname -sm)" = "Linux x86_64" ] || fail "DALI's plugin needs Linux on x86-64; this is $(uname -sm). See docs/install.md."
command -v "$python" >/dev/null || fail "there is no $python. Install Python 3.10 to 3.13, for example: apt-get install python3"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  fail "$python is $("$python" --version 2>&1); Python 3.10 to 3.13 is needed. Name another one: make install PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python has no venv module. Install it, for example: apt-get install python3-venv"
command -v g++ >/dev/null || fail "there is no g++, which compiles DALI's TensorFlow plugin. Install it, for example: apt-get install g++"

if ! "$venv/bin/python" -c '' 2>/dev/null; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# The version ranges are in pyproject.toml only: these read them from there.
section() { awk -v start="^$1 = \\\\[" '$0 ~ start { on = 1 } on { print } on && /\]$/ { exit }' pyproject.toml | grep -o '"[^"]*"' | tr -d '"'; }
requirement() { section dependencies | grep "^$1\([^a-z0-9-]\|\$\)"; }
tensorflow=$(requirement tensorflow)
if has gpu; then tensorflow=$(section gpu); fi

say "installing TensorFlow and DALI: a download of about 1 GB (with CUDA's libraries 4 GB)"
mapfile -t build_tools < <(section plugin-build)
pip install --quiet "$tensorflow" "$(requirement nvidia-dali-cuda120)" "${build_tools[@]}"

# The plugin is compiled against this TensorFlow and this DALI, so they come first, and pip must neither hide them
# (build isolation) nor reuse a plugin that was compiled against others (its cache). Meanwhile the rest is installed.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
dali_version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("nvidia-dali-cuda120"))')
plugin_works() { TF_CPP_MIN_LOG_LEVEL=3 "$venv/bin/python" -c 'import nvidia.dali.plugin.tf' >/dev/null 2>&1; }
wheels=$(mktemp -d)
compiler=
trap '[ -z "$compiler" ] || kill "$compiler" 2>/dev/null || true; rm -rf "$wheels"' EXIT
if ! plugin_works; then
  say "compiling DALI's TensorFlow plugin $dali_version (half a minute)"
  env -u CUDA_PATH -u CPLUS_INCLUDE_PATH -u C_INCLUDE_PATH \
    CUDA_HOME="$site/nvidia/cuda_runtime" CPATH="$site/nvidia/cuda_nvcc/include" PATH="$venv/bin:$PATH" \
    "$venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-cache-dir --no-build-isolation --no-deps \
    --wheel-dir "$wheels" "nvidia-dali-tf-plugin-cuda120==$dali_version" >"$wheels/log" 2>&1 &
  compiler=$!
fi

say "installing dali_tf_input"
extras=scripts
if has dev; then extras+=,dev; fi
if has nightly; then extras+=,nightly; fi
# "compat": a path that editors and type checkers find too.
pip install --quiet --no-build-isolation --config-settings editable_mode=compat --editable ".[$extras]"
if [ -n "$compiler" ]; then
  wait "$compiler" || { cat "$wheels/log" >&2; fail "the plugin did not compile; the compiler's own words are above."; }
  pip install --quiet --force-reinstall --no-deps "$wheels"/*.whl
  plugin_works || { "$venv/bin/python" -c 'import nvidia.dali.plugin.tf' || true; fail "the plugin does not load; see above."; }
fi
# It fits one DALI only, as the plugin does, and its source is a part of the package.
env -u CUDA_PATH -u CPLUS_INCLUDE_PATH -u C_INCLUDE_PATH CUDA_HOME="$site/nvidia/cuda_runtime" \
  "$venv/bin/python" -m dali_tf_input.backends.dali_operator >/dev/null || fail "the operator of DALI did not compile."
"$venv/bin/python" - <<'CHECK'
import importlib.metadata as metadata
names = {"TensorFlow": "tensorflow", "DALI": "nvidia-dali-cuda120", "plugin": "nvidia-dali-tf-plugin-cuda120"}
print("\nready: " + ", ".join(f"{name} {metadata.version(package)}" for name, package in names.items()))
CHECK
