# Makes or reuses .venv; sourced by quickstart and test, which set `extras` and may set `python`.
#
# Afterwards $venv_python is the environment's Python, with mxamp installed from this clone
# (editable) and everything pinned by constraints.txt.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
venv_python=$venv/bin/python
supported="3.8, 3.9, 3.10, 3.11, 3.12 or 3.13"

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

say() {
    printf '%s\n' "$1" >&2
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_supported() {
    case "$1" in
        3.8 | 3.9 | 3.10 | 3.11 | 3.12 | 3.13) return 0 ;;
        *) return 1 ;;
    esac
}

choose_python() {
    local candidate version
    if [ -n "${python:-}" ]; then
        command -v "$python" >/dev/null || fail "no Python at '$python'"
        version=$(version_of "$python") || true
        [ -n "$version" ] || fail "'$python' is no Python that runs"
        is_supported "$version" || fail "'$python' is Python $version; MXNet 1.9.1 needs $supported"
        return
    fi
    if [ -x "$venv_python" ] && is_supported "$(version_of "$venv_python")"; then
        python=$venv_python
        return
    fi
    for candidate in python3.11 python3.10 python3.9 python3.8 python3.12 python3.13 python3 python; do
        version=$(version_of "$candidate") || continue
        if is_supported "$version"; then
            python=$candidate
            return
        fi
    done
    fail "no Python $supported found; install one, or name it with --python"
}

show_progress() {
    # One line that names the package pip is at, where there is a terminal to see it.
    local verb name
    while read -r verb name _; do
        case "$verb" in
            Collecting | Downloading | Installing | Building)
                [ -t 2 ] && printf '\r\033[K  %s %.60s' "$verb" "$name" >&2 ;;
        esac
    done
    [ -t 2 ] && printf '\r\033[K' >&2
    return 0
}

install() {
    # $@: what pip is to install. Progress goes to the terminal, all of pip's words to a file.
    local log=$venv/install.log
    if ! "$venv_python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --constraint "$root/scripts/constraints.txt" "$@" 2>&1 | tee "$log" | show_progress; then
        if grep -qiE 'NewConnectionError|Name or service not known|Temporary failure|ConnectTimeout|Network is unreachable|Connection refused' "$log"; then
            fail "the package registry can't be reached; check the network (pip's words: $log)"
        fi
        fail "installing failed: $(grep -m1 '^ERROR' "$log" || tail -n 1 "$log") (all of it: $log)"
    fi
}

setup() {
    choose_python
    local version stamp wanted
    version=$(version_of "$python")
    if [ -x "$venv_python" ] && [ "$(version_of "$venv_python")" != "$version" ]; then
        say "removing .venv, which has another Python than $version"
        rm -rf "$venv"
    fi
    wanted=$( (echo "$version $extras $root"; cat "$root/setup.cfg" "$root/setup.py" "$root/pyproject.toml" "$root/scripts/constraints.txt") | cksum)
    stamp=$venv/.installed-$(printf '%s' "$extras" | tr ',' '-')
    if [ -x "$venv_python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$venv_python" ]; then
        say "making .venv with Python $version"
        "$python" -m venv "$venv" >/dev/null 2>&1 || fail "'$python' can't make a virtual environment; install its venv package"
    fi
    say "installing mxamp[$extras] and what it needs, about 300 MB; a minute or two"
    install setuptools wheel
    if [ "$version" = 3.13 ]; then
        # MXNet asks for NumPy below 2, of which there is none for 3.13, and runs on 2.1.3.
        install --no-deps mxnet
        install requests graphviz
        install --no-build-isolation --editable "$root[$(printf '%s' "$extras" | sed 's/cpu,//')]"
    else
        install --no-build-isolation --editable "$root[$extras]"
    fi
    case "$extras" in
        *test*) install --no-deps gluoncv ;;
    esac
    printf '%s' "$wanted" >"$stamp"
}
