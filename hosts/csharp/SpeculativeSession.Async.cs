// Streaming with `await foreach`. Needs C# 8; omit this file and ChatClient.cs for older compilers.
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace SpecEdge
{
    public sealed partial class SpeculativeSession
    {
        /// <summary>Same as Generate, with rounds on the thread pool.</summary>
        public IAsyncEnumerable<string> GenerateAsync(
            string prompt, GenerationOptions options = null, CancellationToken cancellation = default) =>
            GenerateAsync(Encode(prompt), options, cancellation);

        /// <summary>Same as Generate, with rounds on the thread pool.</summary>
        public async IAsyncEnumerable<string> GenerateAsync(
            IReadOnlyList<long> prompt, GenerationOptions options = null,
            [EnumeratorCancellation] CancellationToken cancellation = default)
        {
            using (IEnumerator<string> pieces = Generate(prompt, options, cancellation).GetEnumerator())
            {
                // The token is not passed to Task.Run, so that a running round is never disposed.
                while (await Task.Run(pieces.MoveNext).ConfigureAwait(false))
                    yield return pieces.Current;
            }
        }
    }
}
