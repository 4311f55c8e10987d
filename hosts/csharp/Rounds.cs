// A round of drafting, verifying and accepting (docs/hosts.md), in one graph or in three.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace SpecEdge
{
    /// <summary>Memory of the inputs and outputs of a round, allocated once.</summary>
    internal sealed class RoundMemory : IDisposable
    {
        internal readonly int NumDraftTokens;  // K
        internal readonly long[] Allowed = new long[1];  // n, draft tokens that may be accepted
        internal int DraftStart;  // position in the text at which the draft's cache begins
        internal readonly long[] DraftLength = new long[1];
        internal readonly long[] TargetLength = new long[1];
        internal readonly long[] SourceLength = new long[1];
        internal readonly long[] PromptLength = new long[1];
        internal readonly float[] Temperature = new float[1];
        internal readonly long[] TopK = new long[1];
        internal readonly double[] TopP = new double[1];
        internal readonly float[] MinP = new float[1];
        internal readonly float[] RepetitionPenalty = new float[1];
        internal readonly bool[] Seen;
        internal readonly double[] Uniforms;
        internal readonly long[] NextTokens;
        internal readonly long[] NumAccepted = new long[1];

        private readonly Dictionary<string, OrtValue> _inputs;
        private readonly Dictionary<string, OrtValue> _caches = new Dictionary<string, OrtValue>();
        private readonly List<OrtValue> _kept = new List<OrtValue>();

        internal RoundMemory(int numDraftTokens, int vocabSize)
        {
            NumDraftTokens = numDraftTokens;
            Seen = new bool[vocabSize];
            Uniforms = new double[2 * numDraftTokens + 1];
            NextTokens = new long[numDraftTokens + 1];
            _inputs = new Dictionary<string, OrtValue>
            {
                ["num_draft_tokens"] = OrtValue.CreateTensorValueFromMemory(Allowed, new long[] { 1 }),
                ["draft_length"] = OrtValue.CreateTensorValueFromMemory(DraftLength, new long[] { 1 }),
                ["target_length"] = OrtValue.CreateTensorValueFromMemory(TargetLength, new long[] { 1 }),
                ["source_length"] = OrtValue.CreateTensorValueFromMemory(SourceLength, new long[] { 1 }),
                ["prompt_length"] = OrtValue.CreateTensorValueFromMemory(PromptLength, new long[] { 1 }),
                ["temperature"] = OrtValue.CreateTensorValueFromMemory(Temperature, new long[] { 1 }),
                ["top_k"] = OrtValue.CreateTensorValueFromMemory(TopK, new long[] { 1 }),
                ["top_p"] = OrtValue.CreateTensorValueFromMemory(TopP, new long[] { 1 }),
                ["min_p"] = OrtValue.CreateTensorValueFromMemory(MinP, new long[] { 1 }),
                ["repetition_penalty"] = OrtValue.CreateTensorValueFromMemory(RepetitionPenalty, new long[] { 1 }),
                ["seen"] = OrtValue.CreateTensorValueFromMemory(Seen, new long[] { 1, vocabSize }),
                ["uniforms"] = OrtValue.CreateTensorValueFromMemory(Uniforms, new long[] { Uniforms.Length }),
            };
        }

        /// <summary>Small inputs, by role.</summary>
        internal IReadOnlyDictionary<string, OrtValue> Inputs => _inputs;

        /// <summary>Returns the buffer of a cache in native memory, zeroed on first use.</summary>
        internal OrtValue Cache(TensorEntry entry, string model)
        {
            string name = model + entry.State;
            if (_caches.TryGetValue(name, out OrtValue cache))
                return cache;
            if (entry.Type != "float32")
                throw new InvalidDataException($"cache {name} has type {entry.Type}; this host supports float32 only");
            cache = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, TensorElementType.Float, entry.Shape);
            cache.GetTensorMutableDataAsSpan<float>().Clear();  // unwritten rows must be finite
            return _caches[name] = cache;
        }

        internal IRound Open(Bundle bundle, SessionOptions options) =>
            bundle.IsFused ? (IRound)new FusedRound(bundle, this, options) : new SplitRound(bundle, this, options);

        /// <summary>Sets the options, and marks the prompt's tokens as seen.</summary>
        internal void Set(GenerationOptions options, IReadOnlyCollection<long> prompt)
        {
            PromptLength[0] = prompt.Count;
            Temperature[0] = options.Temperature;
            TopK[0] = options.TopK;
            TopP[0] = options.TopP;
            MinP[0] = options.MinP;
            RepetitionPenalty[0] = options.RepetitionPenalty;
            Array.Clear(Seen, 0, Seen.Length);
            foreach (long token in prompt)
                Seen[token] = true;
        }

        /// <summary>Sets the start of the draft's cache and the valid rows of both caches.</summary>
        internal void SetLengths(int draftStart, int draft, int target)
        {
            DraftStart = draftStart;
            DraftLength[0] = draft;
            TargetLength[0] = target;
        }

        /// <summary>Creates a tensor that lives as long as this object.</summary>
        internal OrtValue Keep(OrtValue value)
        {
            _kept.Add(value);
            return value;
        }

        /// <summary>Creates a tensor of tokens for one run.</summary>
        internal static OrtValue Row(IEnumerable<long> tokens)
        {
            long[] row = tokens.ToArray();
            return OrtValue.CreateTensorValueFromMemory(row, new long[] { 1, row.Length });
        }

        /// <summary>Creates a tensor over rows of an array.</summary>
        internal static OrtValue Rows(float[] memory, int start, int count, int columns) => OrtValue.CreateTensorValueFromMemory(
            OrtMemoryInfo.DefaultInstance, new Memory<float>(memory, start * columns, count * columns), new long[] { 1, count, columns });

        public void Dispose()
        {
            foreach (OrtValue value in _inputs.Values.Concat(_caches.Values).Concat(_kept))
                value.Dispose();
        }
    }

    /// <summary>`open.onnx`: constant states of an encoder-decoder's source.</summary>
    internal sealed class SourceGraph : IDisposable
    {
        private readonly RoundMemory _memory;
        private readonly BoundGraph _open;
        private readonly int _rows;  // that audio fills
        private Array _source;

        internal SourceGraph(Bundle bundle, RoundMemory memory, SessionOptions options)
        {
            _rows = bundle.SourceRows;
            _memory = memory;
            _open = new BoundGraph(bundle, bundle.Graph("open"), options);
            _open.BindCaches(state => memory.Cache(state, ""));
        }

        /// <summary>Computes the states of tokens; returns false if they are their own.</summary>
        internal bool Open(long[] tokens) =>
            !(_source is long[] last && last.SequenceEqual(tokens)) &&
            Run("source", OrtValue.CreateTensorValueFromMemory(tokens, new long[] { 1, tokens.Length }), tokens, tokens.Length);

        /// <summary>Computes the states of audio with the bundle's number of samples; returns false if they are its own.</summary>
        internal bool Open(float[] audio) =>
            !(_source is float[] last && last.SequenceEqual(audio)) &&
            Run("audio", OrtValue.CreateTensorValueFromMemory(audio, new long[] { 1, audio.Length }), audio, _rows);

        private bool Run(string role, OrtValue value, Array source, int length)
        {
            _source = null;
            using (value)
            {
                _open.BindInput(role, value);
                _open.Run();
            }
            _memory.SourceLength[0] = length;
            _source = source;
            return true;
        }

        public void Dispose() => _open.Dispose();
    }

    /// <summary>Graphs of a round. Both calls read the text from the cache lengths on.</summary>
    internal interface IRound : IDisposable
    {
        /// <summary>Fills the caches with the text up to a position, without sampling.</summary>
        void Read(List<long> text, int end);

        /// <summary>Drafts, verifies and accepts; returns the next tokens and the number accepted.</summary>
        void Run(List<long> text);
    }

    /// <summary>`round.onnx`: one run.</summary>
    internal sealed class FusedRound : IRound
    {
        private readonly Bundle _bundle;
        private readonly RoundMemory _memory;
        private readonly BoundGraph _round;

        internal FusedRound(Bundle bundle, RoundMemory memory, SessionOptions options)
        {
            _bundle = bundle;
            _memory = memory;
            _round = new BoundGraph(bundle, bundle.Graph("round", memory.NumDraftTokens), options);
            _round.BindCaches(cache => memory.Cache(cache, ""));
            _round.BindInputs(memory.Inputs);
            long[] size = { memory.NextTokens.Length };
            _round.BindOutput("next_tokens", memory.Keep(OrtValue.CreateTensorValueFromMemory(memory.NextTokens, size)));
            size = new long[] { 1 };
            _round.BindOutput("num_accepted", memory.Keep(OrtValue.CreateTensorValueFromMemory(memory.NumAccepted, size)));
        }

        public void Read(List<long> text, int end)
        {
            _memory.Allowed[0] = 0;
            Feed(text, end);
        }

        public void Run(List<long> text) => Feed(text, text.Count);

        public void Dispose() => _round.Dispose();

        private void Feed(List<long> text, int end)
        {
            int first = (int)_memory.DraftLength[0], start = 0;
            foreach (int stop in _bundle.RunEnds(first, end - first))
            {
                if (start > 0)
                    _memory.DraftLength[0] = _memory.TargetLength[0] = first + start;
                using (OrtValue tokens = RoundMemory.Row(text.GetRange(first + start, stop - start)))
                using (_round.BindText(text))
                {
                    _round.BindInput("tokens", tokens);
                    _round.Run();
                }
                start = stop;
            }
        }
    }

    /// <summary>Hidden states that a draft head reads: the target's of its last run, then the head's own.</summary>
    internal sealed class HeadStates : IDisposable
    {
        private readonly BoundGraph _fuse;  // null if the head reads the target's states as they are
        private readonly int _channels, _ownChannels;
        private readonly float[] _returned;  // state after the last row of the head
        private float[] _states, _newStates;  // of the tokens of the target's runs

        internal HeadStates(Bundle bundle, RoundMemory memory, BoundGraph draft, BoundGraph target, SessionOptions options)
        {
            _channels = target.Columns("hidden");
            _ownChannels = draft.Columns("next_hidden");
            _returned = new float[_ownChannels];
            draft.BindOutput("next_hidden", memory.Keep(RoundMemory.Rows(_returned, 0, 1, _ownChannels)));
            if (bundle.Graph("fuse") != null)
                _fuse = new BoundGraph(bundle, bundle.Graph("fuse"), options);
        }

        /// <summary>Allocates states of the target; Keep replaces the previous ones.</summary>
        internal void Allocate(int count) => _newStates = new float[count * _channels];

        /// <summary>Creates an output for some of the allocated states.</summary>
        internal OrtValue Output(int start, int count) => RoundMemory.Rows(_newStates, start, count, _channels);

        internal void Keep() => _states = _newStates;

        /// <summary>Creates an input with some of the kept states, or with the state after the head's last row.</summary>
        internal OrtValue Input(int start, int count, bool isFirst)
        {
            if (!isFirst)
                return RoundMemory.Rows((float[])_returned.Clone(), 0, 1, _ownChannels);
            OrtValue states = RoundMemory.Rows(_states, start, count, _channels);
            if (_fuse == null)
                return states;
            OrtValue fused = RoundMemory.Rows(new float[count * _ownChannels], 0, count, _ownChannels);
            using (states)
            {
                _fuse.BindInput("hidden", states);
                _fuse.BindOutput("fused", fused);
                _fuse.Run();
            }
            return fused;
        }

        public void Dispose() => _fuse?.Dispose();
    }

    /// <summary>`draft.onnx` K times, the target's decoder, and `accept.onnx`.</summary>
    internal sealed class SplitRound : IRound
    {
        private readonly Bundle _bundle;
        private readonly RoundMemory _memory;
        private readonly BoundGraph _draft, _target, _accept;
        private readonly HeadStates _head;  // of a draft that reads hidden states, or null
        private readonly bool[] _seen;  // including drafted tokens
        private readonly double[] _uniform = new double[1];
        private readonly long[] _token = new long[1], _drafted, _from = new long[1];
        private readonly OrtValue[] _weights;  // one row per drafted token
        private readonly float[] _logits;
        private readonly int _columns;

        internal SplitRound(Bundle bundle, RoundMemory memory, SessionOptions options)
        {
            int k = memory.NumDraftTokens, v = bundle.VocabSize;
            _bundle = bundle;
            _memory = memory;
            _seen = new bool[v];
            _drafted = new long[k];
            OrtMemoryInfo here = OrtMemoryInfo.DefaultInstance;
            long[] one = { 1 };

            _draft = new BoundGraph(bundle, bundle.Graph("draft"), options);
            _draft.BindCaches(cache => memory.Cache(cache, ""));
            _draft.BindInputs(memory.Inputs);
            _draft.BindInput("uniforms", memory.Keep(OrtValue.CreateTensorValueFromMemory(_uniform, one)));
            _draft.BindInput("seen", memory.Keep(OrtValue.CreateTensorValueFromMemory(_seen, new long[] { 1, v })));
            _draft.BindOutput("token", memory.Keep(OrtValue.CreateTensorValueFromMemory(_token, one)));
            var weights = new float[k * v];
            _weights = Enumerable.Range(0, k).Select(i => memory.Keep(OrtValue.CreateTensorValueFromMemory(
                here, new Memory<float>(weights, i * v, v), new long[] { 1, v }))).ToArray();

            _target = new BoundGraph(bundle, bundle.Decoder, options);
            _target.BindCaches(cache => memory.Cache(cache, "target."));
            _target.BindInput("past_length", memory.Inputs["target_length"]);
            _target.BindInputs(memory.Inputs);
            _target.BindInput("logits_from", memory.Keep(OrtValue.CreateTensorValueFromMemory(_from, one)));
            _columns = _target.Columns("logits");
            _logits = new float[(k + 1) * _columns];

            if (bundle.ReadsHidden)
                _head = new HeadStates(bundle, memory, _draft, _target, options);

            _accept = new BoundGraph(bundle, bundle.Graph("accept"), options);
            _accept.BindInputs(memory.Inputs);
            _accept.BindInput("logits", memory.Keep(RoundMemory.Rows(_logits, 0, k + 1, _columns)));
            _accept.BindInput("tokens", memory.Keep(OrtValue.CreateTensorValueFromMemory(_drafted, new long[] { k })));
            _accept.BindInput("weights", memory.Keep(OrtValue.CreateTensorValueFromMemory(weights, new long[] { k, v })));
            _accept.BindInput("uniforms", memory.Keep(OrtValue.CreateTensorValueFromMemory(
                here, new Memory<double>(memory.Uniforms, k, k + 1), new long[] { k + 1 })));
            _accept.BindOutput("next_tokens", memory.Keep(OrtValue.CreateTensorValueFromMemory(memory.NextTokens, new long[] { k + 1 })));
            _accept.BindOutput("num_accepted", memory.Keep(OrtValue.CreateTensorValueFromMemory(memory.NumAccepted, one)));
        }

        public void Read(List<long> text, int end)
        {
            List<long> fed = Unread(text, end);
            if (fed.Count > 0)
                Draft(fed, 0, text);
            if (_memory.TargetLength[0] < end)
                Verify(Range(text, _memory.TargetLength[0], end), 1);
            _head?.Keep();
        }

        public void Run(List<long> text)
        {
            Array.Copy(_memory.Seen, _seen, _seen.Length);
            Array.Clear(_drafted, 0, _drafted.Length);
            List<long> fed = Unread(text, text.Count);
            for (int i = 0; i < _drafted.Length && fed.Count > 0; i++)
            {
                Draft(fed, i, text.Concat(_drafted.Take(i)));
                if (_head != null && _memory.Allowed[0] == 0)
                    break;  // only the target's states had to be read
                _drafted[i] = _token[0];
                _seen[_token[0]] = true;
                fed = new List<long> { _token[0] };
            }
            List<long> verified = Range(text, _memory.TargetLength[0], text.Count);
            verified.AddRange(_drafted);
            Verify(verified, _drafted.Length + 1);
            using (_accept.BindText(text))
                _accept.Run();
            _head?.Keep();
        }

        public void Dispose()
        {
            foreach (IDisposable part in new IDisposable[] { _draft, _target, _accept, _head })
                part?.Dispose();
        }

        /// <summary>Returns the tokens up to a position that the draft has not read; a head reads state i with token i + 1.</summary>
        private List<long> Unread(List<long> text, int end)
        {
            long start = _memory.DraftStart + _memory.DraftLength[0], known = _memory.TargetLength[0];
            return _head == null ? Range(text, start, Math.Max((int)start, end)) : Range(text, start + 1, (int)known + 1);
        }

        /// <summary>Runs a draft step and samples the next token of a text with random number i.</summary>
        private void Draft(List<long> fed, int i, IEnumerable<long> text)
        {
            _uniform[0] = _memory.Uniforms[i];
            int start = 0;
            foreach (int end in _bundle.RunEnds(_memory.DraftLength[0], fed.Count))
            {
                using (OrtValue tokens = RoundMemory.Row(fed.GetRange(start, end - start)))
                using (OrtValue hidden = _head?.Input(start, end - start, i == 0))
                using (_draft.BindText(text))
                {
                    _draft.BindInput("tokens", tokens);
                    if (hidden != null)
                        _draft.BindInput("hidden", hidden);
                    _draft.BindOutput("weights", _weights[i]);
                    _draft.Run();
                }
                _memory.DraftLength[0] += end - start;
                start = end;
            }
        }

        /// <summary>Runs the target and computes the logits of the last rows.</summary>
        private void Verify(List<long> fed, int rows)
        {
            int start = 0, first = fed.Count - rows;
            _head?.Allocate(fed.Count);
            foreach (int end in _bundle.RunEnds(_memory.TargetLength[0], fed.Count))
            {
                int from = Math.Max(start, Math.Min(first, end - 1));  // each run has logits of a row, which the next may replace
                _from[0] = from - start;
                using (OrtValue tokens = RoundMemory.Row(fed.GetRange(start, end - start)))
                using (OrtValue logits = RoundMemory.Rows(_logits, Math.Max(0, from - first), end - from, _columns))
                using (OrtValue hidden = _head?.Output(start, end - start))
                {
                    _target.BindInput("tokens", tokens);
                    if (hidden != null)
                        _target.BindOutput("hidden", hidden);
                    _target.BindOutput("logits", logits);
                    _target.Run();
                }
                _memory.TargetLength[0] += end - start;
                start = end;
            }
        }

        private static List<long> Range(List<long> text, long start, int end) =>
            text.GetRange((int)start, end - (int)start);
    }
}
