// Console program: text, an interactive conversation, token ids, or a replay of conformance vectors.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Threading;

namespace SpecEdge
{
    internal static class Program
    {
        private const int Interrupted = 130;  // exit status of programs ended by Ctrl-C
        private static CancellationTokenSource _running = new CancellationTokenSource();

        private static int Main(string[] arguments)
        {
            var output = new StreamWriter(Console.OpenStandardOutput(), new UTF8Encoding(false)) { AutoFlush = true };
            if (arguments.Contains("--help") || arguments.Contains("-h"))
            {
                output.WriteLine(Arguments.Usage);
                return 0;
            }
            Console.CancelKeyPress += (sender, pressed) =>
            {
                pressed.Cancel = true;  // the round ends first, and then memory is released
                _running.Cancel();
            };
            try
            {
                return Run(new Arguments(arguments), output);
            }
            catch (OperationCanceledException)
            {
                output.WriteLine();
                Console.Error.WriteLine("cancelled");
                return Interrupted;
            }
            catch (Exception e)
            {
                while (e is TypeInitializationException && e.InnerException != null)
                    e = e.InnerException;  // ONNX Runtime's library cannot be loaded
                string what = e is DllNotFoundException ? "ONNX Runtime's library is missing; README.md says where it is looked for: " : "";
                Console.Error.WriteLine($"error: {what}{e.Message.Split('\n')[0].TrimEnd()}");
                return 1;
            }
        }

        private static int Run(Arguments asked, TextWriter output)
        {
            if (asked.Golden)
                return Golden.Replay(asked.Bundle, output) == 0 ? 0 : 1;
            using (var session = new SpeculativeSession(asked.Bundle, asked.NumDraftTokens))
            {
                if (asked.Ids != null)
                    output.WriteLine(string.Join(",", session.Rounds(asked.Ids, asked.Options, _running.Token).SelectMany(round => round.Tokens)));
                else if (asked.Audio != null)
                    Transcribe(session, WavFile.Read(asked.Audio), asked.Options, output);
                else if (asked.Prompt != null)
                    Write(session, session.Encode(asked.Prompt), asked.Options, output);
                else
                    Talk(session, asked.Options, output);
            }
            return 0;
        }

        /// <summary>Each line is a turn that reuses the caches. Ctrl-C ends only the turn.</summary>
        private static void Talk(SpeculativeSession session, GenerationOptions options, TextWriter output)
        {
            var input = new StreamReader(Console.OpenStandardInput(), new UTF8Encoding(false));
            for (string line; (line = input.ReadLine()) != null;)
            {
                try
                {
                    bool isSource = session.Bundle.MaxSourceLength != 0;  // a line is a source of its own
                    IEnumerable<long> prompt = isSource
                        ? session.Encode(line)
                        : session.Tokens.Concat(session.Encode(line + "\n"));
                    Write(session, prompt.ToList(), options, output);
                }
                catch (OperationCanceledException)
                {
                    output.WriteLine();
                    _running = new CancellationTokenSource();
                }
            }
        }

        /// <summary>Writes the text of at most 30 s of audio, or its tokens if the bundle has no tokenizer graphs.</summary>
        private static void Transcribe(SpeculativeSession session, float[] audio, GenerationOptions options, TextWriter output)
        {
            if (session.Bundle.IdsOnly != null)
                output.WriteLine(string.Join(",", session.Rounds(audio, options, _running.Token).SelectMany(round => round.Tokens)));
            else
                Write(session.Transcribe(audio, options, _running.Token), output);
        }

        private static void Write(
            SpeculativeSession session, IReadOnlyList<long> prompt, GenerationOptions options, TextWriter output) =>
            Write(session.Generate(prompt, options, _running.Token), output);

        private static void Write(IEnumerable<string> pieces, TextWriter output)
        {
            foreach (string piece in pieces)
                output.Write(piece);
            output.WriteLine();
        }
    }
}
