using System;
using System.Collections.Generic;

namespace SpecEdge
{
    /// <summary>Sampling options; greedy by default.</summary>
    public sealed class GenerationOptions
    {
        public int MaxNewTokens { get; set; } = 64;

        /// <summary>0 is greedy; filters are then unused.</summary>
        public float Temperature { get; set; }

        /// <summary>Samples from the k most likely tokens; 0 is off.</summary>
        public long TopK { get; set; }

        /// <summary>Samples from the smallest set of tokens with total probability p; 1 is off.</summary>
        public double TopP { get; set; } = 1;

        /// <summary>Minimum probability relative to the most likely token; 0 is off.</summary>
        public float MinP { get; set; }

        /// <summary>Penalty for tokens in the prompt or output; 1 is off.</summary>
        public float RepetitionPenalty { get; set; } = 1;

        /// <summary>Random seed; the same seed gives the same text.</summary>
        public ulong Seed { get; set; }

        /// <summary>Tokens that begin the text of an encoder-decoder after its start tokens, such as a language; null for the bundle's.</summary>
        public IReadOnlyList<long> DecoderPrefix { get; set; }

        internal void Check()
        {
            // These conditions are false for NaN.
            Require(MaxNewTokens >= 1, "max-new-tokens must be at least 1", MaxNewTokens);
            Require(Temperature >= 0 && Temperature <= float.MaxValue, "temperature must be at least 0", Temperature);
            Require(TopK >= 0, "top-k must be at least 0", TopK);
            Require(TopP > 0 && TopP <= 1, "top-p must be above 0 and at most 1", TopP);
            Require(MinP >= 0 && MinP <= 1, "min-p must be from 0 to 1", MinP);
            Require(RepetitionPenalty > 0 && RepetitionPenalty <= float.MaxValue,
                "repetition-penalty must be above 0", RepetitionPenalty);
        }

        private static void Require(bool holds, string rule, object found)
        {
            if (!holds)
                throw new ArgumentException(FormattableString.Invariant($"{rule}, got {found}"));
        }
    }

    /// <summary>Output of a round: accepted draft tokens, then one token of the target.</summary>
    public sealed class Round
    {
        internal Round(IReadOnlyList<long> tokens, int numAccepted)
        {
            Tokens = tokens;
            NumAccepted = numAccepted;
        }

        public IReadOnlyList<long> Tokens { get; }
        public int NumAccepted { get; }
    }
}
