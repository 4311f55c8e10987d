using System;
using System.Collections.Generic;

namespace SpecEdge
{
    /// <summary>How a text is written. Greedy unless there is a temperature.</summary>
    public sealed class GenerationOptions
    {
        public int MaxNewTokens { get; set; } = 64;

        /// <summary>0 takes the likeliest token, and the filters are then unused.</summary>
        public float Temperature { get; set; }

        /// <summary>Draws from the likeliest tokens only; 0 is off.</summary>
        public long TopK { get; set; }

        /// <summary>Draws from the likeliest tokens whose probabilities reach this; 1 is off.</summary>
        public double TopP { get; set; } = 1;

        /// <summary>Drops tokens less likely than this share of the likeliest; 0 is off.</summary>
        public float MinP { get; set; }

        /// <summary>Makes tokens of the text less likely, by division; 1 is off.</summary>
        public float RepetitionPenalty { get; set; } = 1;

        /// <summary>The same seed draws the same text again.</summary>
        public ulong Seed { get; set; }

        internal void Check()
        {
            // Written so that NaN is refused, too.
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

    /// <summary>What one round wrote: drafted tokens that were accepted, then one of the target.</summary>
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
