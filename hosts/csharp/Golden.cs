using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;

namespace SpecEdge
{
    /// <summary>Replays the conformance vectors of golden.json.</summary>
    internal static class Golden
    {
        /// <summary>Prints a line per transcript and returns the number of differences.</summary>
        internal static int Replay(string folder, TextWriter output)
        {
            Bundle bundle = Bundle.Read(folder);
            if (bundle.Golden == null)
                throw new InvalidDataException($"{folder} has no conformance vectors; run `specedge embed --bundle {folder}`");
            bundle.Open(bundle.Golden);
            IReadOnlyList<JsonValue> transcripts = JsonValue.Read(folder, bundle.Golden)["transcripts"].Items;
            int differing = 0;
            foreach (var sameK in transcripts.GroupBy(transcript => (int)transcript["num_draft_tokens"].Integer))
                using (var session = new SpeculativeSession(folder, sameK.Key))
                    foreach (JsonValue transcript in sameK)
                    {
                        string difference = Difference(session, transcript);
                        differing += difference == null ? 0 : 1;
                        output.WriteLine($"{(difference == null ? "same   " : "DIFFERS")} {Title(transcript)}{difference}");
                    }
            return differing;
        }

        private static string Difference(SpeculativeSession session, JsonValue transcript)
        {
            long[] prompt = Integers(transcript["prompt_tokens"]);
            bool hasText = session.Bundle.IdsOnly == null;
            if (hasText && !session.Encode(transcript["prompt"].Text).SequenceEqual(prompt))
                return ": other tokens of the prompt";
            var options = new GenerationOptions
            {
                MaxNewTokens = (int)transcript["max_new_tokens"].Integer,
                Temperature = (float)transcript["temperature"].Number,
                TopK = transcript["top_k"].Integer,
                TopP = transcript["top_p"].Number,
                MinP = (float)transcript["min_p"].Number,
                RepetitionPenalty = (float)transcript["repetition_penalty"].Number,
                Seed = unchecked((ulong)transcript["seed"].Integer),
            };
            List<Round> rounds = session.Rounds(prompt, options).ToList();
            long[] tokens = rounds.SelectMany(round => round.Tokens).ToArray();
            if (!tokens.SequenceEqual(Integers(transcript["tokens"])))
                return ": other tokens";
            if (!rounds.Select(round => (long)round.NumAccepted).SequenceEqual(Integers(transcript["num_accepted"])))
                return ": other numbers of accepted tokens";
            if (hasText && string.Concat(TextGraphs.Pieces(rounds.Select(round => session.Decode(round.Tokens)))) != transcript["text"].Text)
                return ": another text of the same tokens";
            return null;
        }

        private static string Title(JsonValue transcript) => FormattableString.Invariant(
            $"K {transcript["num_draft_tokens"].Integer}, temperature {transcript["temperature"].Number}, seed {transcript["seed"].Integer}, {Integers(transcript["tokens"]).Length} tokens");

        private static long[] Integers(JsonValue list) => list.Items.Select(item => item.Integer).ToArray();
    }
}
