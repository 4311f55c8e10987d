// Text from a bundle, by speculative decoding: the class to take into an app. There is no sampling in it,
// which is all in the bundle's graphs; docs/hosts.md has the loop.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using Microsoft.ML.OnnxRuntime;

namespace SpecEdge
{
    /// <summary>A bundle's models with their caches, which hold one text.</summary>
    /// <remarks>
    /// A prompt that begins as that text does goes on from the caches: give the whole of it, such as
    /// <c>session.Generate(session.Tokens.Concat(session.Encode("more")).ToArray())</c>. Any thread may use a
    /// session; a text that another was begun after ends with an InvalidOperationException.
    /// </remarks>
    public sealed partial class SpeculativeSession : IDisposable
    {
        private const int MaxRead = 256;  // tokens of a prompt in one run, which bounds its memory

        private readonly object _gate = new object();  // held while graphs run
        private readonly RoundMemory _memory;
        private readonly IRound _round;
        private readonly TextGraphs _graphs;
        private List<long> _text = new List<long>();
        private int _draftStart;  // where in the text the draft's cache begins
        private int _draftLength, _targetLength;  // how many rows of the caches count
        private int _turn;
        private bool _disposed;

        /// <summary>Opens a bundle. K is its own number of draft tokens a round, if none is given.</summary>
        public SpeculativeSession(string folder, int numDraftTokens = 0)
        {
            Bundle = Bundle.Read(folder);
            NumDraftTokens = Bundle.CheckedNumDraftTokens(numDraftTokens);
            _memory = new RoundMemory(NumDraftTokens, Bundle.VocabSize);
            try
            {
                using (SessionOptions options = OnnxRuntimeSettings.ForModels(Bundle))
                    _round = _memory.Open(Bundle, options);
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

        /// <summary>The last prompt and what was written after it.</summary>
        public IReadOnlyList<long> Tokens => Locked(() => _text.ToArray());

        /// <summary>How many tokens of the last prompt were in the caches already.</summary>
        public int NumReused { get; private set; }

        /// <summary>Continues a prompt, in pieces of text as they come.</summary>
        public IEnumerable<string> Generate(
            string prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken)) =>
            Generate(Encode(prompt), options, cancellation);

        /// <summary>Continues a prompt of tokens, in text. Cancelling throws an OperationCanceledException after a round.</summary>
        public IEnumerable<string> Generate(
            IReadOnlyList<long> prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            Bundle.RequireText();
            return TextGraphs.Pieces(Rounds(prompt, options, cancellation).Select(round => Decode(round.Tokens)));
        }

        /// <summary>Continues a prompt of tokens, in tokens.</summary>
        public IEnumerable<Round> Rounds(
            IReadOnlyList<long> prompt, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            options = options ?? new GenerationOptions();
            options.Check();
            Bundle.CheckPrompt(prompt);
            return Run(prompt.ToList(), options, cancellation);
        }

        /// <summary>The tokens of a text, none of which is a control token, whatever the text spells.</summary>
        public long[] Encode(string text) => Locked(() => _graphs.Encode(text));

        /// <summary>The UTF-8 of tokens, which may end in the middle of a character.</summary>
        public byte[] Decode(IEnumerable<long> tokens) => Locked(() => _graphs.Decode(tokens));

        /// <summary>Frees models and caches, once a round that runs has ended.</summary>
        public void Dispose()
        {
            lock (_gate)
            {
                if (!_disposed)
                    foreach (IDisposable part in new IDisposable[] { _round, _graphs, _memory })
                        part?.Dispose();
                _disposed = true;
            }
        }

        private IEnumerable<Round> Run(List<long> text, GenerationOptions options, CancellationToken cancellation)
        {
            int limit = Math.Min(text.Count + options.MaxNewTokens, Bundle.ContextLength);
            int turn = Locked(() => Begin(text, options));
            ulong used = 0;
            do
            {
                yield return Locked(() =>
                {
                    if (turn != _turn)
                        throw new InvalidOperationException("another text was begun on this session");
                    int most = PlaceDraft();
                    for (int read; text.Count - (read = Math.Min(_draftStart + _draftLength, _targetLength)) > MaxRead; Read(read + MaxRead))
                        cancellation.ThrowIfCancellationRequested();
                    cancellation.ThrowIfCancellationRequested();
                    SplitMix64.Fill(_memory.Uniforms, options.Seed, used);
                    return Next(limit - text.Count, most);
                });
                used += (ulong)_memory.Uniforms.Length;
            }
            while (text.Count < limit && !Bundle.EndTokens.Contains(text.Last()));
        }

        /// <summary>Takes a text in place of the last one, and keeps the rows of what both begin with.</summary>
        private int Begin(List<long> text, GenerationOptions options)
        {
            int common = 0;
            while (common < Math.Min(_text.Count, text.Count - 1) && _text[common] == text[common])
                common++;
            _draftLength = Math.Max(0, Math.Min(_draftLength, common - _draftStart));
            NumReused = _targetLength = Math.Min(_targetLength, common);
            _text = text;
            _memory.Set(options, text);
            return ++_turn;
        }

        /// <summary>Lets a draft of a shorter context begin anew where docs/bundle.md has it, and gives how much it may draft.</summary>
        private int PlaceDraft()
        {
            int context = Bundle.DraftContextLength, step = context - context / 2;
            int start = Math.Max(0, (_text.Count - context + step - 1) / step * step);
            if (start != _draftStart)
                _draftLength = 0;
            _draftStart = start;
            return start + context - _text.Count + 1;
        }

        /// <summary>Fills the caches up to a place in the prompt.</summary>
        private void Read(int end)
        {
            _memory.SetLengths(_draftStart, _draftLength, _targetLength);
            _round.Read(_text, end);
            _draftLength = Math.Max(_draftLength, end - _draftStart);
            _targetLength = Math.Max(_targetLength, end);
        }

        /// <summary>Runs a round for a text that wants so many tokens more, of which at most so many may be drafted.</summary>
        private Round Next(int wanted, int most)
        {
            int before = _text.Count;
            bool greedy = _memory.Temperature[0] == 0;
            _memory.SetLengths(_draftStart, _draftLength, _targetLength);
            _memory.Allowed[0] = Math.Min(Math.Min(NumDraftTokens, most), greedy ? wanted - 1 : wanted);
            _round.Run(_text);
            // What goes beyond the limit or an end token is cut off.
            int accepted = (int)_memory.NumAccepted[0];
            List<long> tokens = _memory.NextTokens.Take(Math.Min(accepted + 1, wanted)).ToList();
            int end = tokens.FindIndex(Bundle.EndTokens.Contains);
            if (end >= 0)
                tokens.RemoveRange(end + 1, tokens.Count - end - 1);
            _text.AddRange(tokens);
            tokens.ForEach(token => _memory.Seen[token] = true);
            _targetLength = _text.Count - 1;
            _draftLength = Math.Min(_targetLength, before + NumDraftTokens - 1) - _draftStart;
            return new Round(tokens, Math.Min(accepted, tokens.Count));
        }

        private T Locked<T>(Func<T> call)
        {
            lock (_gate)
                return _disposed ? throw new ObjectDisposedException(nameof(SpeculativeSession)) : call();
        }
    }
}
