# Makes or reuses .venv; sourced by quickstart and test, which may set `python`, and by docs and
# check_gpu, which have environments of their own.
#
# Afterwards $venv_python is the environment's Python, with mxamp installed from this clone
# (editable) and everything pinned by constraints.txt.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
supported="3.8, 3.9, 3.10, 3.11, 3.12 or 3.13"
size="300 MB, a minute or two"

use_venv() {
    # $1: the folder of the environment; $2: what of mxamp's extras it gets.
    venv_name=$1
    extras=$2
    venv=$root/$1
    venv_python=$venv/bin/python
    log=$venv/install.log
    stamp=$venv/.installed
    unfinished=$venv/.unfinished
    made_for=$venv/.made-for
}

use_venv .venv cpu,demo,docs,test

fail() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

say() {
    printf '%s\n' "$1" >&2
}

read_python() {
    # $@: the arguments that are left, of which the first is --python or --python=PYTHON.
    case "$1" in
        --python) python=${2:-} ;;
        *) python=${1#*=} ;;
    esac
    [ -n "$python" ] || fail "--python needs a value: a command or the path of Python $supported" 2
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

use_gpu_venv() {
    # $1, $2 as for use_venv: an environment for mxnet-cu112.
    use_venv "$1" "$2"
    supported="3.8, 3.9, 3.10, 3.11 or 3.12"

    is_supported() {
        # The wheel asks for NumPy below 2, of which there is none for 3.13.
        case "$1" in
            3.8 | 3.9 | 3.10 | 3.11 | 3.12) return 0 ;;
            *) return 1 ;;
        esac
    }
}

choose_python() {
    local candidate version
    if [ -n "${python:-}" ]; then
        type -P -- "$python" >/dev/null || fail "no Python at '$python'; name a command or a path, such as python3.11"
        version=$(version_of "$python") || true
        [ -n "$version" ] || fail "'$python' is no Python that runs; MXNet 1.9.1 needs Python $supported"
        is_supported "$version" || fail "'$python' is Python $version; MXNet 1.9.1 needs $supported"
        return
    fi
    for candidate in "$venv_python" python3.11 python3.10 python3.9 python3.8 python3.12 python3.13 python3 python; do
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
    local verb name terminal=""
    [ ! -t 2 ] || [ "${TERM:-dumb}" = dumb ] || terminal=1
    while read -r verb name _; do
        case "$verb" in
            Collecting | Downloading | Installing | Building)
                [ -z "$terminal" ] || printf '\r\033[K  %s %.60s' "$verb" "$name" >&2 ;;
        esac
    done
    [ -z "$terminal" ] || printf '\r\033[K' >&2
}

# What pip says where it can't get at the index at all.
unreachable='NewConnectionError|Name or service not known|Temporary failure|ConnectTimeout'
unreachable+='|Network is unreachable|Connection refused|ProxyError|CERTIFICATE_VERIFY_FAILED'

explain_failure() {
    # $1: what was being installed; $2: pip's exit status.
    local found advice
    [ "$2" -lt 128 ] && [ -z "$interrupted" ] ||
        fail "installing $1 was interrupted. Run the same command again." 130
    rm -f "$unfinished"
    found=$(grep -m1 '^ERROR' "$log" || tail -n 1 "$log")
    advice="Put that right and run the same command again."
    if "$venv_python" -m pip config list 2>/dev/null | grep -qE "no-index='(1|t|true|y|yes|on)'"; then
        advice="pip is told to use no index (PIP_NO_INDEX): PIP_FIND_LINKS must lead to what scripts/constraints.txt lists."
    elif grep -qiE "$unreachable" "$log"; then
        found="the package index can't be reached"
        advice="Check the network, and the proxy and the index that pip is set to (pip config list)."
    fi
    found=${found#ERROR: }
    fail "installing $1 failed: ${found%.}. $advice All that pip said is in $log"
}

install() {
    # $1: what this is; $2: what it takes; the rest: what pip is to install. Its words go to a file.
    local what=$1
    say "installing $what, $2"
    shift 2
    local status=0
    # pip ends with a status like any other after Ctrl-C.
    interrupted=""
    trap 'interrupted=1' INT
    (cd "$root" && PIP_USER=0 "$venv_python" -m pip install --disable-pip-version-check --no-input \
        --progress-bar off --constraint scripts/constraints.txt "$@" 2>&1) |
        tee "$log" | show_progress || status=${PIPESTATUS[0]}
    trap - INT
    [ "$status" = 0 ] || explain_failure "$what" "$status"
}

remake_where_needed() {
    # $1: the Python version that is wanted.
    local why="" has
    [ -e "$venv" ] || [ -L "$venv" ] || return 0
    has=$(version_of "$venv_python") || true
    if [ -e "$unfinished" ]; then
        why="its set-up was interrupted"
    elif [ -z "$has" ]; then
        why="its Python does not run"
    elif [ "$has" != "$1" ]; then
        why="it has Python $has, not $1"
    elif [ -e "$made_for" ] && [ "$(cat "$made_for")" != "$root" ]; then
        why="its folder was moved"
    else
        return 0
    fi
    say "making $venv_name anew: $why"
    rm -rf "$venv"
}

make_venv() {
    local said
    say "making $venv_name with Python $1, a few seconds"
    if ! said=$("$python" -m venv "$venv" 2>&1); then
        rm -rf "$venv"
        fail "'$python' can't make a virtual environment; install its venv package. It said: $(printf '%s' "$said" | tail -n 1)"
    fi
}

setup() {
    local version wanted
    choose_python
    version=$(version_of "$python")
    # What a .venv's Python was made from: that .venv may be the one to be made anew.
    python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", "") or sys.executable)')
    wanted=$( (cd "$root" && printf '%s\n' "$version $extras $root" &&
        cat setup.cfg setup.py pyproject.toml scripts/constraints.txt scripts/setup.sh) | cksum)
    # One at a time; a pip that outlives its killed script keeps the lock until it ends.
    exec 9<"$root/scripts/setup.sh"
    if type -P flock >/dev/null && ! flock -n 9; then
        say "waiting for another set-up of this folder to end"
        flock 9
    fi
    remake_where_needed "$version"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        install_everything "$version"
        printf '%s' "$wanted" >"$stamp"
        say "$venv_name is ready, after $SECONDS s"
    fi
    exec 9<&-
}

install_packages() {
    # $1: the Python version. Scripts with another environment have their own.
    if [ "$1" = 3.13 ]; then
        # MXNet asks for NumPy below 2, of which there is none for 3.13, and runs on 2.1.3.
        install MXNet "50 MB, half a minute" --no-deps mxnet
        install "what MXNet needs" "a few seconds" requests graphviz
        install "mxamp and what else it needs" "up to a minute" \
            --no-build-isolation --editable ".[${extras#cpu,}]"
    else
        install "mxamp, MXNet and the test tools" "$size" \
            --no-build-isolation --editable ".[$extras]"
    fi
    install GluonCV "a few seconds" --no-deps gluoncv
}

install_everything() {
    # $1: the Python version. A kill leaves $unfinished behind, a failure of pip does not.
    mkdir -p "$venv"
    : >"$unfinished"
    rm -f "$stamp"
    [ -x "$venv_python" ] || make_venv "$1"
    printf '%s' "$root" >"$made_for"
    install "pip's build tools" "a few seconds" setuptools wheel
    install_packages "$1"
    rm -f "$unfinished"
}
