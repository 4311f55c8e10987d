"""The C# host: for .NET with ONNX Runtime's managed API or by P/Invoke, and for Mono."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hosting import host_tools, libraries, onnxruntime_library

SOURCES = Path(__file__).parents[2] / "hosts" / "csharp"
PROJECT = "SpecEdge.Host.csproj"
WITHOUT_CSHARP_8 = ("SpeculativeSession.Async.cs", "ChatClient.cs")
QUIET = ("-v", "q", "-nologo", "-warnaserror", "-nodeReuse:false", "-p:UseSharedCompilation=false")


@dataclass(frozen=True)
class Built:
    """A host with its checks: what to run, in which environment."""

    host: list[str]
    checks: list[str]
    environment: dict[str, str]

    def on(self, library: Path) -> Built:
        """Run with another native library of ONNX Runtime, by P/Invoke."""
        return replace(self, environment=self.environment | {"SPECEDGE_ONNXRUNTIME": str(library)})

    def run(self, *arguments, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the host with arguments, and `given` on its standard input."""
        return self._run([*self.host, *map(str, arguments)], given)

    def check(self, bundle: Path) -> subprocess.CompletedProcess[str]:
        """Run the checks on a bundle."""
        return self._run([*self.checks, str(bundle)], None)

    def start(self, terminal: int, *arguments) -> subprocess.Popen[bytes]:
        """The host while it runs, at a terminal: Mono sees Ctrl-C nowhere else."""
        command = [*self.host, *map(str, arguments)]
        return subprocess.Popen(
            command, env=self.environment, stdin=terminal, stdout=terminal, stderr=terminal
        )

    def _run(self, command, given):
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.environment["HOME"],  # where Mono would leave word of a crash
            input=given or "",
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )


def build(kind: str, folder: Path) -> Built:
    """One of "managed", "pinvoke" and "mono" in a new folder; skips the test without its tools."""
    folder.mkdir()
    home = folder / "home"
    home.mkdir()
    environment = libraries() | {"HOME": str(home), "LC_ALL": "C.UTF-8"}
    if kind == "mono":
        return Built(*(_mono(folder, main) for main in ("Program", "Checks")), environment)
    if kind == "managed":
        # Where .NET looks for the native library; a NuGet package would put it beside the program.
        native = folder / "native"
        native.mkdir()
        (native / "libonnxruntime.so").symlink_to(onnxruntime_library())
        environment |= {"LD_LIBRARY_PATH": str(native)}
        del environment["SPECEDGE_ONNXRUNTIME"]
    return Built(
        *(_dotnet(kind, folder, main, home) for main in ("Program", "Checks")), environment
    )


def _dotnet(kind: str, folder: Path, main: str, home: Path) -> list[str]:
    """Build the host as its README does without NuGet."""
    tools = host_tools("bin/dotnet", "managed/Microsoft.ML.OnnxRuntime.dll")
    dotnet = str(tools / "bin/dotnet")
    source, output = folder / f"{main}-source", folder / main
    shutil.copytree(SOURCES, source)
    how = {
        "managed": f"-p:OnnxRuntimeDll={tools / 'managed/Microsoft.ML.OnnxRuntime.dll'}",
        "pinvoke": "-p:PInvoke=true",
    }
    options = ["-p:TargetFramework=netcoreapp3.1", how[kind], f"-p:Checks={main == 'Checks'}"]
    command = [dotnet, "build", *QUIET, *options, "-o", output, source / PROJECT]
    _built(command, {"HOME": str(home), "PATH": "/usr/bin:/bin"})
    return [dotnet, str(output / "specedge-host.dll")]


def _mono(folder: Path, main: str) -> list[str]:
    mcs, mono = shutil.which("mcs"), shutil.which("mono")
    if not (mcs and mono):
        pytest.skip("Mono is missing; run tools/hosts/setup.sh as root")
    files = [*SOURCES.glob("*.cs"), *SOURCES.glob("checks/Checks.cs")]
    files = [file for file in files if file.name not in WITHOUT_CSHARP_8]
    output = folder / f"{main}.exe"
    options = ["-unsafe", "-langversion:latest", "-warnaserror"]
    _built([mcs, *options, f"-main:SpecEdge.{main}", f"-out:{output}", *files], None)
    return [mono, str(output)]


def _built(command, environment):
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
