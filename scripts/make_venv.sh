#!/bin/sh
# Usage: make_venv.sh VENV EXTRAS: makes or repairs the virtual environment VENV and installs the
# project into it, editable, with EXTRAS ("train" or "train,dev"). Each package has the version and
# one of the hashes of constraints.txt, the tools that build the project too. When all is done
# VENV/.ready-EXTRA has for each extra a checksum of all that decides what is installed: while that
# is the same, as after a pull that changed only the times of files, nothing is installed.
# VENV/.installing stands for a call that did not end well. The environment variables PYTHON (an
# interpreter) and JAX (a version other than the
# locked one, with which nothing is compared with hashes) are optional.
set -eu

venv=$1
extras=$2
least="3, 12"

fail() {
  printf '\nerror: %s\n\n' "$*" >&2
  exit 1
}

# Versions are asked of the interpreter itself: a name such as python3.13 may be a shim for one
# that is not installed.
new_enough() {
  "$1" -c "import sys; sys.exit(sys.version_info < ($least))" >/dev/null 2>&1
}

describe() {
  "$1" -c 'import platform; print("Python", platform.python_version())' 2>/dev/null || echo "not found"
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.12 or newer ($(describe "$PYTHON"))." \
      "Give the path of a newer one, or leave PYTHON out to let make search for it."
    echo "$PYTHON"
    return
  fi
  for name in python3.12 python3.13 python3.14 python3 python; do
    if new_enough "$name"; then
      # The interpreter behind a shim: the environment must not depend on where a shim is called.
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

python=$(find_python)
uv=$(command -v uv || true)

# Without its pyvenv.cfg the interpreter would run as the one it was made from, and the packages
# would land there.
is_venv() {
  new_enough "$1/bin/python" &&
    "$1/bin/python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'
}

if ! is_venv "$venv"; then
  if [ -e "$venv" ]; then
    case $venv in
      .venv*) ;;
      *) [ -e "$venv/pyvenv.cfg" ] || fail "$venv exists and is not a virtual environment;" \
        "remove it, or name another folder with VENV=..." ;;
    esac
    echo "$venv is incomplete or was made by a Python that is gone: making it anew."
    rm -rf "$venv"
  fi
  if [ -n "$uv" ]; then
    # Without an interpreter of our own uv downloads one.
    "$uv" venv --quiet --python "${python:-3.12}" "$venv" || fail \
      "uv could not make $venv with Python ${python:-3.12} (see above)."
  else
    [ -n "$python" ] || fail "no Python 3.12 or newer was found (python3 is: $(describe python3))." \
      "Install one (from python.org, your package manager, or by 'uv python install 3.12') and run" \
      "make again; if it is not on the PATH, name it: make PYTHON=/path/to/python3.12 ..."
    "$python" -m venv "$venv" || fail "$python could not make a virtual environment (see above)." \
      "On Debian and Ubuntu the package python3-venv is needed."
  fi
fi

# The build of JAX for NVIDIA GPUs needs a driver that knows CUDA 13.
if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) &&
  [ -n "$driver" ]; then
  if [ "${driver%%.*}" -ge 580 ] 2>/dev/null; then
    extras=$extras,cuda13
  else
    echo "The NVIDIA driver $driver is older than 580, which CUDA 13 needs: installing for the CPU."
  fi
fi

wanted="$(cat pyproject.toml constraints*.txt scripts/locked.py scripts/make_venv.sh | cksum)"
wanted="$wanted ${JAX:-} ${extras#"$2"}"
ready=yes
for extra in $(echo "$2" | tr , ' '); do
  grep -s -q -x -F -e "$wanted" "$venv/.ready-$extra" || ready=no
done
if [ $ready = yes ] && [ ! -e "$venv/.installing" ]; then
  for extra in $(echo "$2" | tr , ' '); do touch "$venv/.ready-$extra"; done
  exit 0
fi
touch "$venv/.installing"

echo "Installing lnssm-jax[$extras] into $venv ($(describe "$venv/bin/python")); this is done once."
if [ -n "$uv" ]; then
  install="$uv pip install --quiet --python $venv/bin/python"
else
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --upgrade
  # pip compiles modules on one core, half of the time that it takes; all cores do below.
  install="$venv/bin/python -m pip install --no-compile --quiet --disable-pip-version-check"
fi
failed="the packages could not be installed (see above). Without a network, use a Python that has\
 them as it is; this environment, if it worked before: make VENV= PYTHON=$venv/bin/python ..."
if [ -n "${JAX:-}" ]; then
  { grep -o '^[A-Za-z0-9_.-]*==[^ ;\\]*' constraints.txt | grep -v -E '^(jax|jaxlib)=='
    echo "jax==$JAX"; } >"$venv/constraints.txt"
  $install --constraint "$venv/constraints.txt" --editable ".[$extras]" || fail "$failed"
else
  "$venv/bin/python" scripts/locked.py "$extras" >"$venv/requirements.txt" || fail \
    "the lock files do not fit pyproject.toml (see above)."
  $install --require-hashes --requirement "$venv/requirements.txt" || fail "$failed"
  # setuptools warns that an editable project imports from its folder.
  PYTHONWARNINGS=ignore $install --no-deps --no-build-isolation --editable . || fail "$failed"
fi
# Some packages have files that are no Python, on purpose. Of these little or nothing is imported.
seldom='/(tests|scipy|pip|setuptools|fontTools|pygments)/'
"$venv/bin/python" -m compileall -q -j 0 -x "$seldom" "$venv/lib" >/dev/null 2>&1 || true

for extra in $(echo "$2" | tr , ' '); do
  echo "$wanted" >"$venv/.ready-$extra"
done
rm -f "$venv/.installing"
