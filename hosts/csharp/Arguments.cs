using System;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;

namespace SpecEdge
{
    /// <summary>Command-line arguments; invalid ones raise an ArgumentException.</summary>
    internal sealed class Arguments
    {
        internal const string Usage =
            "usage: specedge-host BUNDLE [PROMPT] [-n N] [-k K] [--temperature T] [--top-k N] [--top-p P] [--min-p P]\n" +
            "                     [--repetition-penalty R] [--seed S] [--decoder-prefix 5,17]\n" +
            "       specedge-host BUNDLE --ids 5,17,3 ...     token ids in and out\n" +
            "       specedge-host BUNDLE --audio FILE.wav ... at most 30 s of speech; the prefix is language, task, <|notimestamps|>\n" +
            "       specedge-host BUNDLE --golden             replay golden.json\n" +
            "Without a prompt each line of the standard input goes on from the text so far.";

        internal string Bundle { get; private set; }
        internal string Prompt { get; private set; }
        internal IReadOnlyList<long> Ids { get; private set; }
        internal string Audio { get; private set; }
        internal bool Golden { get; private set; }
        internal int NumDraftTokens { get; private set; }
        internal GenerationOptions Options { get; } = new GenerationOptions();

        internal Arguments(IEnumerable<string> arguments)
        {
            var left = new Queue<string>(arguments);
            while (left.Count > 0)
                Take(left.Dequeue(), left);
            if (Bundle == null)
                throw new ArgumentException("BUNDLE is missing; give the folder of a bundle");
            if (new[] { Prompt != null, Ids != null, Audio != null, Golden }.Count(isGiven => isGiven) > 1)
                throw new ArgumentException("give one of PROMPT, --ids, --audio and --golden");
            Options.Check();
        }

        private void Take(string argument, Queue<string> left)
        {
            switch (argument)
            {
                case "-n": case "--max-new-tokens": Options.MaxNewTokens = (int)Whole(argument, left, 1); break;
                case "-k": case "--num-draft-tokens": NumDraftTokens = (int)Whole(argument, left, 1); break;
                case "--temperature": Options.Temperature = (float)Number(argument, left); break;
                case "--top-k": Options.TopK = Whole(argument, left, 0); break;
                case "--top-p": Options.TopP = Number(argument, left); break;
                case "--min-p": Options.MinP = (float)Number(argument, left); break;
                case "--repetition-penalty": Options.RepetitionPenalty = (float)Number(argument, left); break;
                case "--seed": Options.Seed = Seed(Value(argument, left)); break;
                case "--ids": Ids = Tokens(argument, left); break;
                case "--audio": Audio = Value(argument, left); break;
                case "--decoder-prefix": Options.DecoderPrefix = Tokens(argument, left); break;
                case "--golden": Golden = true; break;
                default:
                    if (argument.StartsWith("-", StringComparison.Ordinal) && argument.Length > 1 && Bundle == null)
                        throw new ArgumentException($"unknown option {argument}");
                    if (Bundle == null)
                        Bundle = argument;
                    else if (Prompt == null && !argument.StartsWith("--", StringComparison.Ordinal))
                        Prompt = argument;
                    else
                        throw new ArgumentException($"unexpected argument {argument}; see specedge-host --help");
                    break;
            }
        }

        private static string Value(string option, Queue<string> left) =>
            left.Count > 0 ? left.Dequeue() : throw new ArgumentException($"{option} needs a value");

        private static long Whole(string option, Queue<string> left, long least)
        {
            string text = Value(option, left);
            return long.TryParse(text, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out long number) &&
                   number >= least && number <= int.MaxValue
                ? number
                : throw new ArgumentException($"{option} must be an integer from {least} to {int.MaxValue}, got '{text}'");
        }

        private static double Number(string option, Queue<string> left)
        {
            string text = Value(option, left);
            return double.TryParse(text, NumberStyles.Float, CultureInfo.InvariantCulture, out double number)
                ? number
                : throw new ArgumentException($"{option} must be a number, got '{text}'");
        }

        /// <summary>Seeds are taken modulo 2^64.</summary>
        private static ulong Seed(string text)
        {
            const decimal size = 18446744073709551616m;
            if (!decimal.TryParse(text, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out decimal seed) ||
                seed < -size || seed > size)
                throw new ArgumentException($"--seed must be an integer from -2^64 to 2^64, got '{text}'");
            return (ulong)(((seed % size) + size) % size);
        }

        private static List<long> Tokens(string option, Queue<string> left) =>
            Value(option, left).Split(',').Select(text => Id(option, text)).ToList();

        private static long Id(string option, string text) =>
            long.TryParse(text, NumberStyles.AllowLeadingSign | NumberStyles.AllowLeadingWhite, CultureInfo.InvariantCulture, out long id)
                ? id
                : throw new ArgumentException($"{option} must be integers separated by commas, got '{text}'");
    }
}
