# Sourced by the scripts: makes or reuses the virtual environment .venv and installs the project in it.
# Usage: . tests/environment.sh EXTRAS     where EXTRAS is "" or "[test]"
# Leaves the environment's programs first on PATH.

# True if all required packages are installed in their versions. Needs no network.
has_all() {
    local needed
    [ -x "$1/.venv/bin/qserve" ] && needed=$(requirements "$1" "$2") &&
        "$1/.venv/bin/python" -m pip install --no-index --quiet --disable-pip-version-check \
            --constraint "$1/tests/constraints.txt" --requirement <(echo "$needed") 2>/dev/null
}

# The requirements of the project with extras, one a line.
requirements() {
    "$1/.venv/bin/python" - "$1/pyproject.toml" "$2" <<'PYTHON'
import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in re.findall(r"[\w-]+", sys.argv[2]):
    print(*project["optional-dependencies"][extra], sep="\n")
PYTHON
}

make_environment() {
    local root python stamp wanted
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    for python in python3.13 python3.12 python3.11 python3; do
        command -v "$python" >/dev/null && "$python" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break
        python=""
    done
    if [ -z "$python" ]; then
        echo "Python 3.11 to 3.13 is needed and was not found on PATH" >&2
        return 1
    fi
    [ -x "$root/.venv/bin/python" ] || "$python" -m venv "$root/.venv" || return 1
    # These files and the extras decide what is installed.
    stamp="$root/.venv/installed$1"
    wanted=$(cat "$root/pyproject.toml" "$root/tests/constraints.txt" | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] && has_all "$root" "$1"; then
        echo "$wanted" >"$stamp"
    elif [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing into $root/.venv (some minutes the first time)"
        # torch first and by its exact version: a range, asked for by another package, would fetch
        # several GB of CUDA libraries on a machine without a GPU.
        "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            "$(grep '^torch==' "$root/tests/constraints.txt")" || return 1
        "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint "$root/tests/constraints.txt" --editable "$root$1" || return 1
        echo "$wanted" >"$stamp"
    fi
    PATH="$root/.venv/bin:$PATH"
}

make_environment "${1:-}"
