// Speculative decoding of a bundle: the class to use in an application. Sampling is part of the bundle's graphs;
// docs/hosts.md specifies the loop.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using Microsoft.ML.OnnxRuntime;

namespace SpecEdge
{
    /// <summary>A bundle's models with the caches of one text.</summary>
    /// <remarks>
    /// A prompt reuses the caches for its common prefix with that text; pass all of it, such as
    /// <c>session.Generate(session.Tokens.Concat(session.Encode("more")).ToArray())</c>. Any thread may use a
    /// session; starting another text ends the previous one with an InvalidOperationException. The prompt of an
    /// encoder-decoder is its source, and the text begins with <c>GenerationOptions.DecoderPrefix</c>.
    /// </remarks>
    public sealed partial class SpeculativeSession : IDisposable
    {
        private const int MaxRead = 256;  // prompt tokens per run; limits memory

        private readonly object _gate = new object();  // held while graphs run
        private readonly RoundMemory _memory;
        private readonly IRound _round;
        private readonly SourceGraph _source;  // of an encoder-decoder, or null
        private readonly TextGraphs _graphs;
        private List<long> _text = new List<long>();
        private int _draftStart;  // position in the text at which the draft's cache begins
        private int _draftLength, _targetLength;  // valid rows of the caches
        private int _turn;
        private bool _disposed;

        /// <summary>Opens a bundle with K draft tokens per round, by default its own K.</summary>
        public SpeculativeSession(string folder, int numDraftTokens = 0)
        {
            Bundle = Bundle.Read(folder);
            NumDraftTokens = Bundle.CheckedNumDraftTokens(numDraftTokens);
            _memory = new RoundMemory(NumDraftTokens, Bundle.VocabSize);
            try
            {
                using (SessionOptions options = OnnxRuntimeSettings.ForModels(Bundle))
                {
                    _round = _memory.Open(Bundle, options);
                    if (Bundle.MaxSourceLength != 0)
                        _source = new SourceGraph(Bundle, _memory, options);
                }
                _graphs = new TextGraphs(Bundle);
            }
            catch
            {
                Dispose();
                throw;
            }
        }

        public Bundle Bundle { get; }

        public int NumDraftTokens { get; }

        /// <summary>The last prompt and the tokens generated after it.</summary>
        public IReadOnlyList<long> Tokens => Locked(() => _text.ToArray());

        /// <summary>Number of tokens of the last prompt that were reused from the caches.</summary>
        public int NumReused { get; private set; }

        /// <summary>Continues a prompt and streams text.</summary>
        public IEnumerable<string> Generate(
            string prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken)) =>
            Generate(Encode(prompt), options, cancellation);

        /// <summary>Continues a prompt of tokens and streams text. Cancellation throws an OperationCanceledException after a round.</summary>
        public IEnumerable<string> Generate(
            IReadOnlyList<long> prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            Bundle.RequireText();
            return TextGraphs.Pieces(Rounds(prompt, options, cancellation).Select(round => Decode(round.Tokens)));
        }

        /// <summary>Continues a prompt of tokens and streams tokens.</summary>
        public IEnumerable<Round> Rounds(
            IReadOnlyList<long> prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            options = options ?? new GenerationOptions();
            options.Check();
            Bundle.CheckPrompt(prompt, options.DecoderPrefix);
            long[] tokens = prompt.ToArray();  // before the caller changes them
            return _source == null
                ? Run(tokens.ToList(), null, options, cancellation)
                : Run(Bundle.FirstTokens(options.DecoderPrefix), () => _source.Open(tokens), options, cancellation);
        }

        /// <summary>Encodes a text; text that spells a control token is encoded as text.</summary>
        public long[] Encode(string text) => Locked(() => _graphs.Encode(text));

        /// <summary>Decodes tokens to UTF-8, which may end inside a character.</summary>
        public byte[] Decode(IEnumerable<long> tokens) => Locked(() => _graphs.Decode(tokens));

        /// <summary>Releases models and caches after the current round.</summary>
        public void Dispose()
        {
            lock (_gate)
            {
                if (!_disposed)
                    foreach (IDisposable part in new IDisposable[] { _round, _source, _graphs, _memory })
                        part?.Dispose();
                _disposed = true;
            }
        }

        /// <summary>Generates the text of a source; `open` returns false if it is that of the last text.</summary>
        private IEnumerable<Round> Run(List<long> text, Func<bool> open, GenerationOptions options, CancellationToken cancellation)
        {
            int limit = Math.Min(text.Count + options.MaxNewTokens, Bundle.ContextLength);
            int turn = Locked(() => Begin(text, open, options));
            ulong used = 0;
            do
            {
                yield return Locked(() =>
                {
                    if (turn != _turn)
                        throw new InvalidOperationException("another text was started on this session");
                    int most = PlaceDraft();
                    for (int read; text.Count - (read = NumRead) > MaxRead; Read(read + MaxRead))
                        cancellation.ThrowIfCancellationRequested();
                    cancellation.ThrowIfCancellationRequested();
                    SplitMix64.Fill(_memory.Uniforms, options.Seed, used);
                    // A draft head has no draft in the first round.
                    return Next(limit - text.Count, Bundle.ReadsHidden && used == 0 ? 0 : most);
                });
                used += (ulong)_memory.Uniforms.Length;
            }
            while (text.Count < limit && !Bundle.EndTokens.Contains(text.Last()));
        }

        /// <summary>Replaces the text and keeps the cache rows of the common prefix, with the same source.</summary>
        private int Begin(List<long> text, Func<bool> open, GenerationOptions options)
        {
            if (open != null && open())
                _text = new List<long>();
            int common = 0;
            while (common < Math.Min(_text.Count, text.Count - 1) && _text[common] == text[common])
                common++;
            if (Bundle.ReadsHidden && common <= _draftLength && common > 0)
                common--;  // the target computes the state of the token before again
            _draftLength = Math.Max(0, Math.Min(_draftLength, common - _draftStart));
            NumReused = _targetLength = Math.Min(_targetLength, common);
            _text = text;
            _memory.Set(options, text);
            return ++_turn;
        }

        /// <summary>Restarts a draft with a shorter context (docs/bundle.md) and returns how many tokens it may draft.</summary>
        private int PlaceDraft()
        {
            int context = Bundle.DraftContextLength, step = context - context / 2;
            int start = Math.Max(0, (_text.Count - context + step - 1) / step * step);
            if (start != _draftStart)
                _draftLength = 0;
            _draftStart = start;
            return start + context - _text.Count + 1;
        }

        /// <summary>Number of tokens that all caches have; a head is one run behind the target.</summary>
        private int NumRead => Bundle.ReadsHidden ? _targetLength : Math.Min(_draftStart + _draftLength, _targetLength);

        /// <summary>Fills the caches up to a position in the prompt.</summary>
        private void Read(int end)
        {
            _memory.SetLengths(_draftStart, _draftLength, _targetLength);
            _round.Read(_text, end);
            _draftLength = Bundle.ReadsHidden ? _targetLength : Math.Max(_draftLength, end - _draftStart);
            _targetLength = Math.Max(_targetLength, end);
        }

        /// <summary>Runs a round for at most `wanted` tokens, of which none follows an end token.</summary>
        private Round Next(int wanted, int most)
        {
            int before = _text.Count;
            _memory.SetLengths(_draftStart, _draftLength, _targetLength);
            // A sampled token's acceptance depends on the draft tokens after it.
            int room = _memory.Temperature[0] == 0 ? wanted - 1 : Bundle.ContextLength - before;
            _memory.Allowed[0] = Math.Min(Math.Min(NumDraftTokens, most), room);
            _round.Run(_text);
            int accepted = (int)_memory.NumAccepted[0];
            List<long> tokens = _memory.NextTokens.Take(Math.Min(accepted + 1, wanted)).ToList();
            int end = tokens.FindIndex(Bundle.EndTokens.Contains);
            if (end >= 0)
                tokens.RemoveRange(end + 1, tokens.Count - end - 1);
            _text.AddRange(tokens);
            tokens.ForEach(token => _memory.Seen[token] = true);
            int drafted = Bundle.ReadsHidden ? _targetLength : before + NumDraftTokens - 1;
            _targetLength = _text.Count - 1;
            _draftLength = Math.Min(_targetLength, drafted) - _draftStart;
            return new Round(tokens, Math.Min(accepted, wanted));
        }

        private T Locked<T>(Func<T> call)
        {
            lock (_gate)
                return _disposed ? throw new ObjectDisposedException(nameof(SpeculativeSession)) : call();
        }
    }
}
