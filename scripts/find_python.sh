#!/bin/sh
# Prints the path of a Python that can build Laminar's environment.
# On a host that lacks something, says in one paragraph what is missing and exits with 1.
set -eu

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

system=$(uname -s)
[ "$system" = Linux ] || fail "Laminar runs on Linux only, and this host is $system. Use a Linux host, a virtual machine or a container, and run make there again."

# PYTHON=... on make's command line decides alone; otherwise the first that fits is taken.
candidates=${PYTHON:-python3 python3.11 python3.12 python3.13}
found=
for candidate in $candidates; do
    # A version manager's stand-in may exist and still refuse to run: ask the interpreter itself.
    executable=$("$candidate" -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null) || continue
    [ -n "$executable" ] || continue
    found=$executable
    "$executable" -c 'import ensurepip, venv' 2>/dev/null || continue
    printf '%s\n' "$executable"
    exit 0
done

[ -z "$found" ] || fail "Laminar needs Python's venv module, and $found has none. Install it (on Debian and Ubuntu: apt install python3-venv) or name another interpreter, as in: make setup PYTHON=/path/to/python3.11"
fail "Laminar needs Python 3.11 or newer, and none was found (tried: $candidates). Install one (on Debian and Ubuntu: apt install python3 python3-venv) or name it, as in: make setup PYTHON=/path/to/python3.11"
