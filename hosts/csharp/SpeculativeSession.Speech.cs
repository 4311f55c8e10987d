// Speech of at most 30 s, for bundles of Whisper models.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;

namespace SpecEdge
{
    public sealed partial class SpeculativeSession
    {
        /// <summary>Streams the text of audio: samples from -1 to 1 at 16 kHz, at most <c>Bundle.NumSamples</c>.</summary>
        public IEnumerable<string> Transcribe(
            float[] audio, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            Bundle.RequireText();
            return TextGraphs.Pieces(Rounds(audio, options, cancellation).Select(round => Decode(round.Tokens)));
        }

        /// <summary>Streams the tokens of audio.</summary>
        public IEnumerable<Round> Rounds(
            float[] audio, GenerationOptions options = null, CancellationToken cancellation = default(CancellationToken))
        {
            options = options ?? new GenerationOptions();
            options.Check();
            Bundle.CheckAudio(audio);
            if (options.DecoderPrefix == null && Bundle.DecoderPrefix.Count == 0)
                throw new ArgumentException(
                    "speech needs a decoder prefix: tokens of language and task, then <|notimestamps|>");
            var padded = new float[Bundle.NumSamples];
            audio.CopyTo(padded, 0);
            return Run(Bundle.FirstTokens(options.DecoderPrefix), () => _source.Open(padded), options, cancellation);
        }
    }
}
