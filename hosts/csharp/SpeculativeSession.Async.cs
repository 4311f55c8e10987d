// Streaming for `await foreach`. Needs C# 8; leave this file and ChatClient.cs out for older compilers.
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace SpecEdge
{
    public sealed partial class SpeculativeSession
    {
        /// <summary>As Generate; rounds run on the thread pool.</summary>
        public IAsyncEnumerable<string> GenerateAsync(
            string prompt, GenerationOptions options = null, CancellationToken cancellation = default) =>
            GenerateAsync(Encode(prompt), options, cancellation);

        /// <summary>As Generate; rounds run on the thread pool.</summary>
        public async IAsyncEnumerable<string> GenerateAsync(
            IReadOnlyList<long> prompt, GenerationOptions options = null,
            [EnumeratorCancellation] CancellationToken cancellation = default)
        {
            using (IEnumerator<string> pieces = Generate(prompt, options, cancellation).GetEnumerator())
            {
                // The token goes to the text alone, so that nothing is disposed under a round that runs.
                while (await Task.Run(pieces.MoveNext).ConfigureAwait(false))
                    yield return pieces.Current;
            }
        }
    }
}
