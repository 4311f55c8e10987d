#!/bin/sh
# rtx.sh COMMAND...: the command on a machine that seems to have an RTX GPU, for NVIDIA's plug-in to compile for.
# Needs gcc and a namespace of its own, in which the PCI bus shows that GPU; DISPLAY_DEVICE=0x2684, an RTX 4090's.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=${STANDIN_DIR:-${TMPDIR:-/tmp}/standin-cuda}-rtx
cc="${CC:-gcc} -std=gnu11 -O1 -fPIC -shared -Wall -Wextra -Wno-unused-parameter -Wl,-rpath,\$ORIGIN"
if ! [ "$out/libnvidia-ml.so.1" -nt "$here/rtx.c" ]; then
  mkdir -p "$out/pci/0000:01:00.0"
  printf 'libcudart.so.13 { global: *; };\n' > "$out/map"
  $cc -DCUDART "$here/cuda.c" "$here/rtx.c" -o "$out/libcudart.so.13" -Wl,-soname,libcudart.so.13 \
    -Wl,--version-script,"$out/map" -lpthread -ldl
  $cc -DDRIVER "$here/blas.c" "$here/rtx.c" -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 "$out/libcudart.so.13"
  printf '0x10de\n' > "$out/pci/0000:01:00.0/vendor"
  printf '%s\n' "${DISPLAY_DEVICE:-0x2684}" > "$out/pci/0000:01:00.0/device"
  printf '0x030000\n' > "$out/pci/0000:01:00.0/class"
  $cc -DNVML "$here/rtx.c" -o "$out/libnvidia-ml.so.1" -Wl,-soname,libnvidia-ml.so.1
fi
export LD_LIBRARY_PATH="$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" STANDIN_SM="${STANDIN_SM:-89}"
exec unshare -rm sh -c 'mount --bind "$0/pci" /sys/bus/pci/devices && exec "$@"' "$out" "$@"
