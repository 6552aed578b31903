#!/usr/bin/env bash
# Runs what needs a GPU, from the root of a checkout: the checks (`make gpu-test`), or what is named first, a program or
# `-m` and a module, such as benchmarks.gpu (`make gpu-bench`). Further arguments are passed on.
#
# With .gpu/ in the checkout (an offline machine; what was packed there is used through .gpu/setup.sh) the python3 of the
# system serves, with its own PyTorch, and the native library is built here into build/gpu. Otherwise .venv serves. Needs
# g++, cmake and nvcc. Exits with 0 when all went well, 1 when something failed, and 2 when there is no GPU.
set -euo pipefail
program=(tests/gpu/check.py)
if [[ $# -gt 1 && $1 == -m ]]; then
  program=(-m "$2")
  shift 2
elif [[ $# -gt 0 && -e $1 ]]; then
  program=("$1")
  shift
fi
if [[ -f .gpu/setup.sh ]]; then
  # shellcheck disable=SC1091
  source .gpu/setup.sh
  site=$PWD/build/gpu/site
  rm -rf "$site"
  mkdir -p "$site/hidet_dist-0.1.0.dist-info"
  cp -r python/hidet_dist "$site/"
  printf 'Metadata-Version: 2.1\nName: hidet_dist\nVersion: 0.1.0\n' >"$site/hidet_dist-0.1.0.dist-info/METADATA"
  cmake -S . -B build/gpu/native -DCMAKE_BUILD_TYPE=Release >build/gpu/cmake.log
  cmake --build build/gpu/native --parallel >>build/gpu/cmake.log
  cmake --install build/gpu/native --prefix "$site" >>build/gpu/cmake.log
  export PYTHONPATH=$site:$PYTHONPATH HIDET_DIST_NCCL_LIBRARY=${HIDET_DIST_NCCL_LIBRARY:-$HOME/nccl/libnccl.so.2}
  python=python3
else
  python=.venv/bin/python
fi
for folder in .gpu-models/minilm "$HOME/minilm"; do # see pack.sh
  if [[ -z ${HIDET_DIST_MINILM:-} && -d $folder ]]; then
    export HIDET_DIST_MINILM=$folder
  fi
done
export NCCL_MULTI_RANK_GPU_ENABLE=1 PYTHONUNBUFFERED=1
exec "$python" "${program[@]}" "$@"
