using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

namespace SpecEdge
{
    /// <summary>A graph whose inputs and outputs are bound to memory once.</summary>
    /// <remarks>Bound memory belongs to the caller and must outlive all runs.</remarks>
    internal sealed class BoundGraph : IDisposable
    {
        private readonly GraphEntry _entry;
        private readonly bool _readsText;
        private readonly InferenceSession _session;
        private readonly OrtIoBinding _binding;
        private readonly RunOptions _options = new RunOptions();

        internal BoundGraph(Bundle bundle, GraphEntry entry, SessionOptions options)
        {
            _entry = entry;
            _readsText = entry.Inputs.Any(input => input.Role == "text_tokens");
            _session = Opened(bundle, entry, options);
            _binding = _session.CreateIoBinding();
        }

        /// <summary>Opens a session for a graph after verifying its file.</summary>
        internal static InferenceSession Opened(Bundle bundle, GraphEntry entry, SessionOptions options)
        {
            string path = bundle.Open(entry.File);
            try
            {
                return new InferenceSession(path, options);
            }
            catch (OnnxRuntimeException e)
            {
                throw Failed(entry, "open", e);
            }
        }

        /// <summary>Binds each cache to one buffer, in and out, so that rows are written in place.</summary>
        internal void BindCaches(Func<TensorEntry, OrtValue> buffer)
        {
            foreach (TensorEntry input in _entry.Inputs.Where(input => input.Role == "state"))
                _binding.BindInput(input.Name, buffer(input));
            foreach (TensorEntry output in _entry.Outputs.Where(output => output.Role == "state"))
                _binding.BindOutput(output.Name, buffer(output));
        }

        /// <summary>Binds the tensors, by role, that the graph has as inputs or outputs.</summary>
        internal void BindInputs(IReadOnlyDictionary<string, OrtValue> values)
        {
            foreach (TensorEntry input in _entry.Inputs.Where(input => values.ContainsKey(input.Role)))
                _binding.BindInput(input.Name, values[input.Role]);
        }

        internal void BindInput(string role, OrtValue value) =>
            _binding.BindInput(Find(_entry.Inputs, role).Name, value);

        /// <summary>Binds a whole text if the graph reads it; returns what to dispose after the run, or null.</summary>
        internal OrtValue BindText(IEnumerable<long> text)
        {
            if (!_readsText)
                return null;
            OrtValue value = RoundMemory.Row(text);
            BindInput("text_tokens", value);
            return value;
        }

        internal void BindOutput(string role, OrtValue value) =>
            _binding.BindOutput(Find(_entry.Outputs, role).Name, value);

        /// <summary>Number of columns of an output.</summary>
        internal int Columns(string role) => (int)Find(_entry.Outputs, role).Shape.Last();

        internal void Run()
        {
            try
            {
                _session.RunWithBinding(_options, _binding);
            }
            catch (OnnxRuntimeException e)
            {
                throw Failed(_entry, "run", e);
            }
        }

        public void Dispose()
        {
            _binding.Dispose();
            _options.Dispose();
            _session.Dispose();
        }

        private TensorEntry Find(IEnumerable<TensorEntry> entries, string role) =>
            entries.FirstOrDefault(entry => entry.Role == role) ?? throw new InvalidDataException(
                $"{_entry.File} has no '{role}'; run `specedge embed` again");

        private static InvalidDataException Failed(GraphEntry entry, string what, OnnxRuntimeException e) =>
            new InvalidDataException(
                $"ONNX Runtime {OrtEnv.Instance().GetVersionString()} cannot {what} {entry.File} " +
                $"({e.Message.Split('\n')[0]}); run `specedge embed` again", e);
    }
}
