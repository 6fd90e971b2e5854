#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them.
#   bash setup/test.sh            the quick ones (minutes)
#   bash setup/test.sh all        also the slow ones: kills, compilation, a SLURM that is installed with apt
#   bash setup/test.sh -k NAME    words that start with a dash go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup/env.sh
make_env requirements-dev.txt

select=(-m "not slow")
if [ "${1:-}" = all ]; then
    select=()
    export REQUIRE_SLURM=${REQUIRE_SLURM:-1} # 0: skip the tests of tests/slurm where it cannot be installed
    shift
elif [ $# -gt 0 ] && [[ $1 != -* ]]; then
    echo "error: unknown argument '$1': give nothing, 'all', or options for pytest" >&2
    exit 2
fi
"$PY" -m ruff check .
"$PY" -m ruff format --check .
# Two processes, as many as it takes to keep two cores busy: each test has one thread. -n 0 to see all they print.
exec "$PY" -m pytest -n 2 --no-loadscope-reorder "${select[@]}" "$@"
