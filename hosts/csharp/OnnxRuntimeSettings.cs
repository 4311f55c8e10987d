// What ONNX Runtime has to be told so that a bundle's graphs give what they gave when it was made.
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
        /// <summary>Options for the graphs of a bundle's models.</summary>
        internal static SessionOptions ForModels(Bundle bundle)
        {
            string name = OrtEnv.Instance().GetVersionString();
            Version version = Version.Parse(Regex.Match(name, @"^\d+\.\d+").Value);
            if (version < Version.Parse(bundle.OldestOnnxRuntime))
                throw new InvalidDataException(
                    $"the bundle needs ONNX Runtime {bundle.OldestOnnxRuntime} or later, this is {name}");
            var options = new SessionOptions { LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            foreach (KeyValuePair<string, string> entry in bundle.SessionOptions)
                options.AddSessionConfigEntry(entry.Key, entry.Value);
            if (bundle.MultipliesBytes && BytesMaySaturate())
                options.AddSessionConfigEntry("session.x64quantprecision", "1");
            return options;
        }

        /// <summary>Options for `encode` and `decode`, which are of operators of ONNX Runtime Extensions.</summary>
        internal static SessionOptions ForText()
        {
            var options = new SessionOptions { LogSeverityLevel = OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR };
            string library = Environment.GetEnvironmentVariable("SPECEDGE_EXTENSIONS");
            try
            {
                if (string.IsNullOrEmpty(library))
                    options.RegisterOrtExtensions();  // of the NuGet package Microsoft.ML.OnnxRuntime.Extensions
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

        /// <summary>Whether sums of products of bytes might saturate ("Bytes" in docs/bundle.md).</summary>
        /// <remarks>Where nothing tells, they might: the cure costs time where there is VNNI, but changes no bit.</remarks>
        private static bool BytesMaySaturate()
        {
            if (RuntimeInformation.ProcessArchitecture != Architecture.X64)
                return false;
            const string processor = "/proc/cpuinfo";
            if (!File.Exists(processor))
                return true;
            string flags = File.ReadLines(processor).FirstOrDefault(line => line.StartsWith("flags")) ?? "";
            return !Regex.IsMatch(flags, @"\b(avx512_vnni|avx_vnni)\b");
        }
    }
}
