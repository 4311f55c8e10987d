namespace SpecEdge
{
    /// <summary>Counter-based random numbers (Steele, Lea and Flood 2014).</summary>
    internal static class SplitMix64
    {
        /// <summary>Fills a span with consecutive random numbers in [0, 1).</summary>
        internal static void Fill(double[] numbers, ulong seed, ulong first)
        {
            unchecked
            {
                for (int i = 0; i < numbers.Length; i++)
                {
                    ulong z = seed + (first + (ulong)i + 1) * 0x9E3779B97F4A7C15UL;
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9UL;
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EBUL;
                    numbers[i] = ((z ^ (z >> 31)) >> 11) * (1.0 / (1UL << 53));
                }
            }
        }
    }
}
