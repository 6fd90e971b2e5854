# Sourced by the scripts beside it: `make_env FILE` makes .venv and installs a requirements file into it.
# After it, $PY is that environment's Python. PYTHON=... chooses the one it is made from.

make_env() {
    local requirements=$1 stamp wanted
    local python=${PYTHON:-}
    if [ -z "$python" ]; then
        for python in python3.11 python3 python; do command -v "$python" >/dev/null && break; done
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: Python 3.11 or newer is needed, found: $("$python" --version 2>&1 || echo none)." \
            "Install it, or name one with PYTHON=/path/to/python3.11 $0" >&2
        return 2
    fi
    PY=$PWD/.venv/bin/python
    if ! "$PY" -c '' 2>/dev/null; then
        echo "making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv || { echo "error: cannot make .venv (on Debian: apt install python3-venv)" >&2; return 2; }
    fi
    wanted=$(cat requirements.txt requirements-data.txt "$requirements" | cksum)
    stamp=.venv/installed-$(basename "$requirements")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing $requirements into .venv"
        "$PY" -m pip install --quiet --disable-pip-version-check -r "$requirements" || {
            echo "error: pip could not install $requirements (its own message is above)" >&2
            return 2
        }
        echo "$wanted" >"$stamp"
    fi
}
