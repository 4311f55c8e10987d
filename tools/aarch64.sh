#!/bin/bash
# Set up an aarch64 Linux machine, emulated by QEMU, in FOLDER, and run specedge on it.
#
#   tools/aarch64.sh FOLDER              the embedded pair, `specedge verify`, tests of the runtime
#   tools/aarch64.sh FOLDER COMMAND...   one command, such as: python -m pytest tests/runtime/backend
#
# Needs Debian or Ubuntu, `apt install mmdebstrap`, and Python with pip. FOLDER is set up once, in two
# minutes and 1.2 GB: a Debian 12 with Python 3.11, QEMU 10 of Debian 13 (7.2 crashes in ONNX
# Runtime), and wheels of the dependencies. No foreign program runs during the set-up, and none needs
# binfmt_misc. QEMU_CPU selects the processor (cortex-a76). Emulated times say nothing about a real
# machine; the audit is run for MINUTES (25).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' tools/aarch64.sh
    exit 2
fi
mkdir -p "$1"
machine=$(cd "$1" && pwd)
shift
export QEMU_CPU="${QEMU_CPU:-cortex-a76}"

if [ ! -e "$machine/ready" ]; then
    rm -rf "$machine/debian" "$machine/qemu" "$machine/packages"
    mmdebstrap --variant=extract --architectures=arm64 --include=python3,libstdc++6 \
        bookworm "$machine/debian"
    mmdebstrap --variant=extract --include=qemu-user trixie "$machine/qemu"
    python3 - >"$machine/requirements.txt" <<'PYTHON'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for name in [*project["dependencies"], *extras["cpu"], *extras["grammar"], *extras["serve"]]:
    if not name.startswith("specedge["):
        print(name)
for name in extras["test"]:
    if name.startswith(("pytest", "hypothesis", "jsonschema")):
        print(name)
PYTHON
    python3 -m pip install --target "$machine/packages" --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_34_aarch64 --platform manylinux_2_31_aarch64 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        --requirement "$machine/requirements.txt"
    mkdir -p "$machine/bin"
    # Processes that specedge starts run `sys.executable`, which has to be this script.
    cat >"$machine/bin/python" <<WRAPPER
#!/bin/sh
exec "$machine/qemu/usr/bin/qemu-aarch64" -L "$machine/debian" -0 "$machine/bin/python" \\
    -E PYTHONHOME="$machine/debian/usr" -E PYTHONPATH="\$PYTHONPATH" \\
    "$machine/debian/usr/bin/python3.11" "\$@"
WRAPPER
    chmod +x "$machine/bin/python"
    touch "$machine/ready"
fi

export PYTHONPATH="$PWD:$machine/packages" PATH="$machine/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
if [ $# -gt 0 ]; then
    exec "$@"
fi
python -m specedge compare "    def readline(self, size=-1):" -n 120 --repetition-penalty 1.1
python -m pytest -n 0 tests/test_attention_kernels.py tests/runtime/backend/test_self_test.py \
    tests/runtime/decoding
python -m specedge verify --minutes "${MINUTES:-25}"
