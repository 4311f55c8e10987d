using System;
using System.Collections.Generic;
using System.Linq;
using System.Text;
using Microsoft.ML.OnnxRuntime;

namespace SpecEdge
{
    /// <summary>Tokenizer graphs `encode.onnx` and `decode.onnx`.</summary>
    internal sealed class TextGraphs : IDisposable
    {
        private static readonly Encoding Utf8 = new UTF8Encoding(false, true);  // unpaired surrogates are refused

        private readonly Bundle _bundle;
        private readonly RunOptions _run = new RunOptions();
        private InferenceSession _encode, _decode;

        internal TextGraphs(Bundle bundle)
        {
            _bundle = bundle;
        }

        /// <summary>Opens the graphs, which need ONNX Runtime Extensions, on first use.</summary>
        private void Require()
        {
            _bundle.RequireText();
            if (_decode != null)
                return;
            using (SessionOptions options = OnnxRuntimeSettings.ForText())
            {
                _encode = _encode ?? BoundGraph.Opened(_bundle, _bundle.TextGraph("encode"), options);
                _decode = BoundGraph.Opened(_bundle, _bundle.TextGraph("decode"), options);
            }
        }

        internal long[] Encode(string text)
        {
            Require();
            if (text.IndexOf('\0') >= 0)
                throw new ArgumentException("the prompt contains a NUL character, which cannot be encoded; remove it");
            using (OrtValue value = OrtValue.CreateTensorWithEmptyStrings(OrtAllocator.DefaultInstance, new long[] { 1 }))
            {
                value.StringTensorSetElementAt(new ReadOnlySpan<byte>(Utf8.GetBytes(text)), 0);
                var input = new Dictionary<string, OrtValue> { ["text"] = value };
                using (var found = _encode.Run(_run, input, new[] { "tokens" }))
                    return found[0].GetTensorDataAsSpan<long>().ToArray();
            }
        }

        /// <summary>Decodes tokens to UTF-8, which may begin or end inside a character.</summary>
        internal byte[] Decode(IEnumerable<long> tokens)
        {
            Require();
            var bytes = new List<byte>();
            foreach (long token in tokens)  // one by one: NUL truncates a text
            {
                using (OrtValue value = OrtValue.CreateTensorValueFromMemory(new[] { token }, new long[] { 1 }))
                using (var found = _decode.Run(_run, new Dictionary<string, OrtValue> { ["tokens"] = value }, new[] { "text" }))
                    bytes.AddRange(found[0].GetStringElementAsSpan(0).ToArray());
            }
            return bytes.ToArray();
        }

        /// <summary>Streaming decoder that holds incomplete characters back.</summary>
        internal static IEnumerable<string> Pieces(IEnumerable<byte[]> parts)
        {
            Decoder decoder = Encoding.UTF8.GetDecoder();
            foreach (byte[] part in parts)
            {
                string piece = Take(decoder, part, false);
                if (piece.Length > 0)
                    yield return piece;
            }
            string rest = Take(decoder, new byte[0], true);
            if (rest.Length > 0)
                yield return rest;
        }

        public void Dispose()
        {
            foreach (IDisposable part in new IDisposable[] { _encode, _decode, _run })
                part?.Dispose();
        }

        private static string Take(Decoder decoder, byte[] bytes, bool isLast)
        {
            var chars = new char[decoder.GetCharCount(bytes, 0, bytes.Length, isLast)];
            return new string(chars, 0, decoder.GetChars(bytes, 0, bytes.Length, chars, 0, isLast));
        }
    }
}
