// The parts of a bundle's manifest (docs/bundle.md) that a host needs, and the verification of its files.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using System.Text.RegularExpressions;

namespace SpecEdge
{
    /// <summary>An input or output of a graph, identified by its role.</summary>
    public sealed class TensorEntry
    {
        internal TensorEntry(JsonValue entry)
        {
            Name = entry["name"].Text;
            Role = entry["role"].Text;
            State = entry["state"].IsNull ? null : entry["state"].Text;
            Type = entry["dtype"].Text;
            // A letter is a size that changes between runs; the batch size B of a cache is 1.
            Shape = entry["shape"].Items.Select(size => size.IsInteger ? size.Integer : 1).ToArray();
        }

        public string Name { get; }
        public string Role { get; }
        public string State { get; }
        public string Type { get; }
        public long[] Shape { get; }
    }

    /// <summary>An ONNX file with its inputs and outputs.</summary>
    public sealed class GraphEntry
    {
        internal GraphEntry(string name, int numDraftTokens, string file, JsonValue signature)
        {
            Name = name;
            NumDraftTokens = numDraftTokens;
            File = file;
            Inputs = signature["inputs"].Items.Select(entry => new TensorEntry(entry)).ToList();
            Outputs = signature["outputs"].Items.Select(entry => new TensorEntry(entry)).ToList();
        }

        public string Name { get; }

        /// <summary>K of a fused round, else 0.</summary>
        public int NumDraftTokens { get; }

        public string File { get; }
        public IReadOnlyList<TensorEntry> Inputs { get; }
        public IReadOnlyList<TensorEntry> Outputs { get; }
    }

    /// <summary>A bundle with host graphs; an invalid one raises an InvalidDataException.</summary>
    public sealed class Bundle
    {
        private const long Format = 10;
        private const string Manifest = "bundle.json";
        private const long MaxHashed = 8 << 20;  // bytes; of larger files only the size is checked
        private const string Again = "copy the bundle again, or run `specedge embed` again";
        private static readonly Regex SafePath = new Regex(@"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*\z");

        private readonly IReadOnlyDictionary<string, JsonValue> _files;
        private readonly string _tokenizer;

        private Bundle(string folder, JsonValue json)
        {
            Folder = folder;
            _files = json["files"].Members;
            _tokenizer = json["tokenizer"].Text;
            JsonValue models = json["models"], target = models["target"], hosts = json["hosts"];
            JsonValue draft = models.Members.ContainsKey("draft") ? models["draft"] : target;  // target: plain decoding
            NumDraftTokens = (int)json["num_draft_tokens"].Integer;
            ContextLength = (int)target["context_length"].Integer;
            VocabSize = (int)target["vocab_size"].Integer;
            DraftContextLength = (int)Math.Min(draft["context_length"].Integer, ContextLength);
            Spare = (int)Math.Min(
                target["capacity"].Integer - ContextLength, draft["capacity"].Integer - DraftContextLength);
            EndTokens = new HashSet<long>(json["end_tokens"].Items.Select(token => token.Integer));
            if (target.Members.TryGetValue("encoder", out JsonValue encoder) && !encoder.IsNull)
            {
                MaxSourceLength = (int)encoder["max_length"].Integer;
                SourceRows = (int)encoder["capacity"].Integer;
            }
            DecoderStart = Tokens(json, "decoder_start");
            DecoderPrefix = Tokens(json, "decoder_prefix");
            Weights = new[] { target["weights"].Text, draft["weights"].Text }.Distinct().ToList();
            if (hosts.IsNull)
                throw new InvalidDataException(
                    $"{folder} has no graphs for hosts; run `specedge embed --bundle {folder}`");
            IdsOnly = hosts["ids_only"].IsNull ? null : hosts["ids_only"].Text;
            Golden = hosts["golden"].IsNull ? null : hosts["golden"].Text;
            OldestOnnxRuntime = hosts["oldest_onnxruntime"].Text;
            SessionOptions = hosts["session_options"].Members.ToDictionary(pair => pair.Key, pair => pair.Value.Text);
            PassBoundaries = Tokens(hosts, "pass_boundaries");
            Graphs = hosts["graphs"].Items.Select(graph => new GraphEntry(
                graph["name"].Text,
                graph["num_draft_tokens"].IsNull ? 0 : (int)graph["num_draft_tokens"].Integer,
                graph["file"].Text,
                graph["signature"])).ToList();
            NumSamples = (int)(Graph("open")?.Inputs.FirstOrDefault(input => input.Role == "audio")?.Shape.Last() ?? 0);
            string ops = hosts["ops"].Text;
            JsonValue decoder = target["graphs"].Items.FirstOrDefault(
                graph => graph["name"].Text == "decoder" && graph["ops"].Text == ops);
            if (decoder != null)
                Decoder = new GraphEntry(
                    "decoder", 0, decoder["file"].Text, target["signatures"][decoder["signature"].Text]);
        }

        public string Folder { get; }

        /// <summary>Default K; a host may use another one that has a graph.</summary>
        public int NumDraftTokens { get; }

        public int ContextLength { get; }

        /// <summary>Tokens that begin each text of an encoder-decoder, whose prompt is the source; empty for other models.</summary>
        public IReadOnlyList<long> DecoderStart { get; }

        /// <summary>Default of GenerationOptions.DecoderPrefix.</summary>
        public IReadOnlyList<long> DecoderPrefix { get; }

        /// <summary>Most tokens of a source; 0 if the model has no encoder.</summary>
        public int MaxSourceLength { get; }

        /// <summary>Samples of audio at 16 kHz of a source; 0 if the model does not read speech.</summary>
        public int NumSamples { get; }

        /// <summary>Rows of the constant states, which audio fills.</summary>
        internal int SourceRows { get; }

        public int VocabSize { get; }

        /// <summary>Context length of the draft, at most the target's.</summary>
        public int DraftContextLength { get; }

        /// <summary>Rows of a cache in addition to the model's context.</summary>
        public int Spare { get; }

        public ISet<long> EndTokens { get; }

        /// <summary>Reason why there are no tokenizer graphs; null if there are.</summary>
        public string IdsOnly { get; }

        /// <summary>File of the conformance vectors, or null.</summary>
        public string Golden { get; }

        public string OldestOnnxRuntime { get; }
        public IReadOnlyDictionary<string, string> SessionOptions { get; }

        /// <summary>Cache lengths that no run may cross, ascending; empty for most models.</summary>
        public IReadOnlyList<long> PassBoundaries { get; }

        /// <summary>`round` for one or more K, or `draft`, `accept` and optionally `fuse`; optionally `encode` and `decode`.</summary>
        public IReadOnlyList<GraphEntry> Graphs { get; }

        /// <summary>The target's decoder, which a split round runs.</summary>
        public GraphEntry Decoder { get; }

        private IReadOnlyList<string> Weights { get; }

        /// <summary>Reads the bundle in a folder and checks the sizes of its files.</summary>
        public static Bundle Read(string folder)
        {
            if (!Directory.Exists(folder))
                throw new InvalidDataException($"folder {folder} does not exist; give the folder of a bundle");
            if (!File.Exists(Path.Combine(folder, Manifest)))
                throw new InvalidDataException($"{folder} is not a bundle: it has no {Manifest}");
            JsonValue json = JsonValue.Read(folder, Manifest);
            if (json["format"].Integer != Format)
                throw new InvalidDataException(
                    $"{folder} has format {json["format"].Integer}, this host reads {Format}; run `specedge embed`");
            var bundle = new Bundle(folder, json);
            foreach (string file in bundle._files.Keys)
                bundle.CheckSize(file);
            foreach (string file in bundle.Weights)
                bundle.Open(file);
            return bundle;
        }

        /// <summary>True if a round is one graph; false if it is a draft step, the target's decoder and the accept rule.</summary>
        public bool IsFused => Graphs.Any(graph => graph.Name == "round");

        /// <summary>True if the draft reads hidden states of the target.</summary>
        public bool ReadsHidden => Graph("draft")?.Inputs.Any(input => input.Role == "hidden") == true;

        /// <summary>Returns the requested K, or the default one; refuses a K without a graph.</summary>
        public int CheckedNumDraftTokens(int asked)
        {
            if (IsFused)
            {
                int[] available = Graphs.Where(graph => graph.Name == "round").Select(graph => graph.NumDraftTokens).ToArray();
                int k = asked != 0 ? asked : available.Contains(NumDraftTokens) ? NumDraftTokens : available[0];
                return available.Contains(k) ? k : throw new ArgumentException(
                    $"the bundle has rounds of {string.Join(", ", available)} draft tokens, not of {k}; run `specedge embed -k {k}`");
            }
            if (Graph("draft") == null || Graph("accept") == null || Decoder == null)
                throw new InvalidDataException($"{Folder} has no graphs of a round; run `specedge embed --bundle {Folder}`");
            int most = Math.Max(NumDraftTokens, Spare - 2);
            if (asked < 0 || asked > most)
                throw new ArgumentException($"num-draft-tokens must be from 1 to {most}, got {asked}");
            return asked != 0 ? asked : NumDraftTokens;
        }

        /// <summary>Validates a prompt; only an encoder-decoder has a decoder prefix.</summary>
        public void CheckPrompt(IReadOnlyList<long> tokens, IReadOnlyList<long> decoderPrefix)
        {
            if (NumSamples != 0)
                throw new ArgumentException("the bundle reads speech; give audio instead of a prompt");
            if (MaxSourceLength == 0 && decoderPrefix != null)
                throw new ArgumentException("a decoder prefix is for encoder-decoders; omit it");
            int most = MaxSourceLength != 0 ? MaxSourceLength : ContextLength - 1;
            if (tokens.Count < 1 || tokens.Count > most)
                throw new ArgumentException($"the prompt has {tokens.Count} tokens, the bundle takes 1 to {most}");
            CheckTokens(tokens);
        }

        /// <summary>Validates the number of samples of audio.</summary>
        public void CheckAudio(IReadOnlyList<float> audio)
        {
            if (NumSamples == 0)
                throw new ArgumentException("the bundle does not read speech; give a prompt instead of audio");
            if (audio.Count < 1 || audio.Count > NumSamples)
                throw new ArgumentException($"the audio has {audio.Count} samples, the bundle takes 1 to {NumSamples}");
        }

        /// <summary>Returns the tokens that begin a text of an encoder-decoder, after validation.</summary>
        internal List<long> FirstTokens(IReadOnlyList<long> prefix)
        {
            List<long> first = DecoderStart.Concat(prefix ?? DecoderPrefix).ToList();
            if (first.Count >= ContextLength)
                throw new ArgumentException($"a text begins with {first.Count} tokens, the bundle takes less than {ContextLength}");
            CheckTokens(first);
            return first;
        }

        private static IReadOnlyList<long> Tokens(JsonValue json, string key) =>
            json.Members.TryGetValue(key, out JsonValue tokens) ? tokens.Items.Select(token => token.Integer).ToList() : new List<long>();

        private void CheckTokens(IReadOnlyList<long> tokens)
        {
            foreach (long token in tokens.Where(token => token < 0 || token >= VocabSize))
                throw new ArgumentException($"token ids are from 0 to {VocabSize - 1}, got {token}");
        }

        /// <summary>Returns the ends of the runs that process tokens after some rows of a cache without crossing a boundary.</summary>
        internal IEnumerable<int> RunEnds(long length, int count) =>
            PassBoundaries.Where(end => length < end && end < length + count).Select(end => (int)(end - length)).Append(count);

        /// <summary>Throws if the bundle has no tokenizer graphs.</summary>
        public void RequireText()
        {
            if (IdsOnly != null)
                throw new InvalidOperationException($"the bundle supports token ids only: {IdsOnly}");
        }

        /// <summary>Returns the graph with a name and, for `round`, a K; null if there is none.</summary>
        public GraphEntry Graph(string name, int numDraftTokens = 0) =>
            Graphs.FirstOrDefault(graph => graph.Name == name && graph.NumDraftTokens == numDraftTokens);

        /// <summary>Returns the graph that encodes or decodes text.</summary>
        public GraphEntry TextGraph(string name) => Graph(name) ?? throw new InvalidDataException(
            $"{Folder} has no '{name}' graph, though nothing says that it takes ids alone; {Again}");

        /// <summary>Returns the id of an added token, such as a control token.</summary>
        public long AddedToken(string content)
        {
            Open(_tokenizer);
            JsonValue token = JsonValue.Read(Folder, _tokenizer)["added_tokens"].Items.FirstOrDefault(
                item => item["content"].Text == content);
            return token?["id"].Integer ?? throw new ArgumentException($"{_tokenizer} has no added token '{content}'");
        }

        /// <summary>Returns the path of a file after verifying its size and hash.</summary>
        public string Open(string file)
        {
            string path = CheckSize(file);
            if (new FileInfo(path).Length > MaxHashed)
                return path;
            using (var sha256 = SHA256.Create())
            using (FileStream content = File.OpenRead(path))
            {
                string hash = BitConverter.ToString(sha256.ComputeHash(content)).Replace("-", "").ToLowerInvariant();
                if (hash != _files[file]["sha256"].Text)
                    throw new InvalidDataException($"{path} is not the file that {Manifest} lists, its SHA-256 differs; {Again}");
            }
            return path;
        }

        private string CheckSize(string file)
        {
            if (!SafePath.IsMatch(file) || !_files.ContainsKey(file))
                throw new InvalidDataException($"'{file}' is not in the files of {Manifest}; {Again}");
            var info = new FileInfo(Path.Combine(Folder, file));
            if (!info.Exists)
                throw new InvalidDataException($"{info.FullName} is missing; {Again}");
            if (info.Length != _files[file]["size"].Integer)
                throw new InvalidDataException(
                    $"{info.FullName} has {info.Length} bytes, not {_files[file]["size"].Integer}; {Again}");
            return info.FullName;
        }
    }
}
