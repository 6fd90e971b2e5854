#!/usr/bin/env bash
# Makes .venv with everything for training, preparing data and testing.
#   bash setup/create_env.sh          what the machine has: CUDA where there is a driver, else CPU
#   bash setup/create_env.sh cpu      PyTorch without CUDA
#   bash setup/create_env.sh cuda     PyTorch with CUDA, an error if the result has none
# uv is used if it is installed (USE_UV=0: not), else pip. With pip, TORCH_INDEX=URL names the index of another
# build of PyTorch (its site lists them); without it the package index decides which build it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup/env.sh

want=${1:-auto}
case $want in
auto | cpu | cuda) ;;
*)
    echo "error: unknown argument '$want': give cpu, cuda or nothing" >&2
    exit 2
    ;;
esac

if [ "${USE_UV:-1}" != 0 ] && command -v uv >/dev/null; then
    backend=auto
    [ "$want" = cpu ] && backend=cpu
    PY=$PWD/.venv/bin/python
    [ -x "$PY" ] || uv venv --python "${PYTHON:-3.11}" .venv
    uv pip install --python "$PY" --torch-backend="$backend" -r requirements-dev.txt || {
        echo "error: uv could not install requirements-dev.txt (its own message is above)" >&2
        exit 2
    }
else
    [ -z "${TORCH_INDEX:-}" ] || export PIP_EXTRA_INDEX_URL=$TORCH_INDEX
    make_env requirements-dev.txt
fi

built=$("$PY" -c 'import torch; print(torch.version.cuda or "cpu")')
if [ "$want" = cuda ] && [ "$built" = cpu ]; then
    echo "error: the PyTorch that was installed has no CUDA; name an index that has with TORCH_INDEX=URL, remove .venv" \
        "and run this again" >&2
    exit 2
fi
"$PY" -c 'import torch; print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or None}, GPUs {torch.cuda.device_count()}")'
echo "ready: source .venv/bin/activate"
