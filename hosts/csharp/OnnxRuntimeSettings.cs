// Session options that a bundle's graphs need to reproduce the results of the export.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text.RegularExpressions;
using Microsoft.ML.OnnxRuntime;

namespace SpecEdge
{
    internal static class OnnxRuntimeSettings
    {
        // Changes no bit on processors with VNNI and doubles the time of long passes there (graph variants in docs/bundle.md).
        private const string SlowBytes = "session.x64quantprecision";

        /// <summary>Options for the graphs of a bundle's models.</summary>
        internal static SessionOptions ForModels(Bundle bundle)
        {
            string name = OrtEnv.Instance().GetVersionString();
            Version version = Version.Parse(Regex.Match(name, @"^\d+\.\d+").Value);
            if (version < Version.Parse(bundle.OldestOnnxRuntime))
                throw new InvalidDataException(
                    $"the bundle needs ONNX Runtime {bundle.OldestOnnxRuntime} or later, this is {name}");
            if (bundle.PassBoundaries.Count > 0 || RuntimeInformation.ProcessArchitecture == Architecture.Arm64)
                DisableFlashAttention();
            var options = new SessionOptions { LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            foreach (KeyValuePair<string, string> entry in bundle.SessionOptions)
                if (entry.Key != SlowBytes || !HasVnni())
                    options.AddSessionConfigEntry(entry.Key, entry.Value);
            return options;
        }

        /// <summary>Options for `encode` and `decode`, which use operators of ONNX Runtime Extensions.</summary>
        internal static SessionOptions ForText()
        {
            var options = new SessionOptions { LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            string library = Environment.GetEnvironmentVariable("SPECEDGE_EXTENSIONS");
            try
            {
                if (string.IsNullOrEmpty(library))
                    options.RegisterOrtExtensions();  // from the NuGet package Microsoft.ML.OnnxRuntime.Extensions
                else
                    options.RegisterCustomOpLibrary(library);
                return options;
            }
            catch (OnnxRuntimeException e)
            {
                options.Dispose();
                throw new InvalidDataException(
                    $"ONNX Runtime Extensions, which text needs, cannot be loaded ({e.Message.Split('\n')[0]}); " +
                    "set SPECEDGE_EXTENSIONS to the path of libortextensions, or add its NuGet package", e);
            }
        }

        /// <summary>Disables a kernel that is not batch-invariant, unless the process's environment has the variable.</summary>
        private static void DisableFlashAttention()
        {
            const string variable = "ORT_GQA_DISABLE_FLASH_ATTENTION";
            if (Environment.GetEnvironmentVariable(variable) != null)
                return;
            Environment.SetEnvironmentVariable(variable, "1");
            if (!RuntimeInformation.IsOSPlatform(OSPlatform.Windows))
                SetEnvironmentVariable(variable, "1", 0);  // .NET's own does not reach native code there
        }

        [DllImport("libc", EntryPoint = "setenv")]
        private static extern int SetEnvironmentVariable(string name, string value, int overwrite);

        private static bool HasVnni()
        {
            const string processor = "/proc/cpuinfo";
            string flags = File.Exists(processor) ? File.ReadLines(processor).FirstOrDefault(line => line.StartsWith("flags")) : null;
            return Regex.IsMatch(flags ?? "", @"\b(avx512_vnni|avx_vnni)\b");
        }
    }
}
