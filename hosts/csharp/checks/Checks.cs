// Checks that the command line cannot make: turns, cancellation, disposal, streaming. Built instead of the host:
// `dotnet run -p:Checks=true -- BUNDLE` prints a line per check and exits with the number of failures.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Text;
using System.Threading;

namespace SpecEdge
{
    internal static partial class Checks
    {
        private const string Prompt = "def read_config(path):";
        private static string _folder;

        private static int Main(string[] arguments)
        {
            _folder = arguments[0];
            Bundle bundle = Bundle.Read(_folder);
            var checks = new List<Action> { PromptIsCopiedInTheCall };
            if (bundle.MaxSourceLength == 0)  // a prompt is not the source of a text
                checks.Add(TurnsThatShareAnyPrefixEqualNewTexts);
            if (bundle.IdsOnly == null)
            {
                checks.AddRange(new Action[]
                {
                    SecondPromptGoesOnFromTheCaches, PromptThatPartsFromTheTextIsReadFromThere,
                    CancellingEndsAfterARoundAndLeavesTheSessionUsable, TextThatIsLeftEarlyLeavesTheSessionUsable,
                    TextThatAnotherWasBegunAfterEnds, DisposedSessionRefuses, DisposalFreesModelsAndCaches,
                    RoundsLeaveNoMemoryBehind,
                    HalfACharacterIsHeldBack, TextBehindATokenOfNulIsKept, TextThatHasNoUtf8IsRefused,
                    JsonIsReadStrictly, RandomNumbersAreSplitMix64, SettingsOutOfRangeAreRefused,
                });
                AddChecksOfAsync(checks);
            }
            int failed = 0;
            foreach (Action check in checks)
            {
                try
                {
                    check();
                    Console.WriteLine($"passed {check.Method.Name}");
                }
                catch (Exception e)
                {
                    failed++;
                    Console.WriteLine($"FAILED {check.Method.Name}: {e}");
                }
            }
            return failed;
        }

        static partial void AddChecksOfAsync(List<Action> checks);

        private static void SecondPromptGoesOnFromTheCaches()
        {
            var options = new GenerationOptions { MaxNewTokens = 20, Temperature = 0.8f, TopK = 20, Seed = 5 };
            using (var session = new SpeculativeSession(_folder))
            using (var fresh = new SpeculativeSession(_folder))
            {
                long[] prompt = session.Encode(Prompt);
                Written(session, prompt, options);
                Require(session.NumReused == 0, "the first prompt has nothing to go on from");
                long[] longer = session.Tokens.Concat(session.Encode("\n    return")).ToArray();
                Require(session.Tokens.Count == prompt.Length + 20, "the text is the prompt and what was written");
                long[] second = Written(session, longer, options);
                Require(session.NumReused == prompt.Length + 19, $"{session.NumReused} tokens were in the caches");
                Require(second.SequenceEqual(Written(fresh, longer, options)), "other tokens than without a first turn");
            }
        }

        private static void PromptThatPartsFromTheTextIsReadFromThere()
        {
            using (var session = new SpeculativeSession(_folder))
            using (var fresh = new SpeculativeSession(_folder))
            {
                Written(session, session.Encode(Prompt + "\n    with open(path) as f:"));
                long[] other = session.Encode(Prompt + "\n    import os");
                long[] found = Written(session, other);
                Require(session.NumReused > 3 && session.NumReused < other.Length, "a part is reused");
                Require(found.SequenceEqual(Written(fresh, other)), "other tokens than from nothing");
                Written(session, other.Take(2).ToArray());
                Require(session.NumReused == 1, "the last token of a prompt is read in any case");
            }
        }

        private static void PromptIsCopiedInTheCall()
        {
            long[] prompt = { 5, 8, 13, 21 };
            using (var session = new SpeculativeSession(_folder))
            using (var fresh = new SpeculativeSession(_folder))
            {
                long[] expected = Written(fresh, prompt);
                IEnumerable<Round> rounds = session.Rounds(prompt, new GenerationOptions { MaxNewTokens = 24 });
                Array.Clear(prompt, 0, prompt.Length);
                Require(rounds.SelectMany(round => round.Tokens).SequenceEqual(expected), "the prompt was read later");
            }
        }

        private static void TurnsThatShareAnyPrefixEqualNewTexts()
        {
            var options = new GenerationOptions { MaxNewTokens = 12, Temperature = 0.8f, Seed = 5 };
            long[] prompt = { 5, 8, 13, 21, 34, 9 };
            using (var session = new SpeculativeSession(_folder))
            using (var other = new SpeculativeSession(_folder))
            {
                Written(session, prompt, options);
                long[] text = session.Tokens.ToArray();
                for (int shared = 1; shared <= text.Length; shared++)
                    foreach (long[] added in new[] { new long[0], new long[] { 7, 11 } })
                    {
                        long[] turn = text.Take(shared).Concat(added).ToArray();
                        Written(session, prompt, options);
                        long[] tokens = Written(session, turn, options);
                        int available = Math.Min(Math.Min(shared, turn.Length - 1), text.Length - 1);
                        Require(session.NumReused >= available - 1, $"{session.NumReused} of {available} tokens are reused");
                        Written(other, new long[] { 7 });
                        Require(tokens.SequenceEqual(Written(other, turn, options)), $"other tokens after {shared} shared ones");
                        Require(other.NumReused == 0, "a text that begins with another token shares nothing");
                    }
            }
        }

        private static void CancellingEndsAfterARoundAndLeavesTheSessionUsable()
        {
            using (var session = new SpeculativeSession(_folder))
            using (var fresh = new SpeculativeSession(_folder))
            {
                long[] prompt = session.Encode(Prompt);
                var source = new CancellationTokenSource();
                int rounds = 0;
                Throws<OperationCanceledException>(() =>
                {
                    foreach (Round round in session.Rounds(prompt, new GenerationOptions(), source.Token))
                        if (++rounds == 2)
                            source.Cancel();
                });
                Require(rounds == 2, $"{rounds} rounds");
                Throws<OperationCanceledException>(() => session.Generate(Prompt, null, source.Token).Count());
                Require(Written(session, prompt).SequenceEqual(Written(fresh, prompt)), "other tokens after cancelling");
            }
        }

        private static void TextThatIsLeftEarlyLeavesTheSessionUsable()
        {
            using (var session = new SpeculativeSession(_folder))
            using (var fresh = new SpeculativeSession(_folder))
            {
                long[] prompt = session.Encode(Prompt);
                session.Rounds(prompt).First();
                Require(Written(session, prompt).SequenceEqual(Written(fresh, prompt)), "other tokens");
            }
        }

        private static void TextThatAnotherWasBegunAfterEnds()
        {
            using (var session = new SpeculativeSession(_folder))
            using (IEnumerator<string> first = session.Generate(Prompt).GetEnumerator())
            {
                first.MoveNext();
                session.Generate("import").First();
                Throws<InvalidOperationException>(() => first.MoveNext());
            }
        }

        private static void DisposedSessionRefuses()
        {
            var session = new SpeculativeSession(_folder);
            IEnumerator<string> text = session.Generate(Prompt).GetEnumerator();
            text.MoveNext();
            session.Dispose();
            session.Dispose();
            Throws<ObjectDisposedException>(() => text.MoveNext());
            Throws<ObjectDisposedException>(() => session.Encode(Prompt));
        }

        private static void DisposalFreesModelsAndCaches()
        {
            // The sessions stay reachable, so that no finalizer releases memory that Dispose leaves.
            var sessions = new List<SpeculativeSession>();
            var sizes = new List<long>();
            for (int i = 0; i < 16; i++)
            {
                sessions.Add(new SpeculativeSession(_folder));
                sessions[i].Generate(Prompt, new GenerationOptions { MaxNewTokens = 8 }).Count();
                sessions[i].Dispose();
                sizes.Add(Resident());
            }
            GC.KeepAlive(sessions);
            // The first few fill the pools of allocators. Leaked text graphs take 30 MiB, caches 80, models 260.
            long left = (sizes.Last() - sizes[7]) >> 20;
            Require(left < 22, $"8 sessions left {left} MiB behind");
        }

        private static void RoundsLeaveNoMemoryBehind()
        {
            using (var session = new SpeculativeSession(_folder))
            {
                var sizes = new List<long>();
                for (int pieces = 0; pieces < 2000; sizes.Add(Resident()))
                {
                    var options = new GenerationOptions { MaxNewTokens = 90, Temperature = 1, Seed = (ulong)sizes.Count };
                    pieces += session.Generate(Prompt, options).Count();
                }
                double growth = (double)sizes.Last() / sizes[sizes.Count / 4];
                Require(growth < 1.2, $"{growth:F3} times the memory after the first texts");
            }
        }

        private static void HalfACharacterIsHeldBack()
        {
            byte[] bytes = Encoding.UTF8.GetBytes("aé漢😀!");
            List<string> pieces = TextGraphs.Pieces(bytes.Select(one => new[] { one })).ToList();
            Require(pieces.SequenceEqual(new[] { "a", "é", "漢", "😀", "!" }), string.Join("|", pieces));
            pieces = TextGraphs.Pieces(new[] { new byte[] { 0x61, 0xF0, 0x9F, 0x98 } }).ToList();
            Require(pieces.SequenceEqual(new[] { "a", "\uFFFD" }), string.Join("|", pieces));
            pieces = TextGraphs.Pieces(new[] { new byte[] { 0xE2, 0x82 }, new byte[] { 0x61 } }).ToList();
            Require(pieces.SequenceEqual(new[] { "\uFFFDa" }), string.Join("|", pieces));
        }

        private static void TextBehindATokenOfNulIsKept()
        {
            using (var session = new SpeculativeSession(_folder))
            {
                long nul = Enumerable.Range(0, session.Bundle.VocabSize).First(token =>
                    !session.Bundle.EndTokens.Contains(token) && session.Decode(new long[] { token }).Length == 0);
                byte[] around = session.Decode(session.Encode("a").Append(nul).Concat(session.Encode("b")));
                Require(around.SequenceEqual(new byte[] { 0x61, 0x62 }), "text behind NUL is lost");
                Require(session.Decode(new long[0]).Length == 0, "nothing is nothing");
                Require(session.Decode(session.Bundle.EndTokens).Length == 0, "a control token has no text");
            }
        }

        private static void TextThatHasNoUtf8IsRefused()
        {
            using (var session = new SpeculativeSession(_folder))
            {
                Throws<ArgumentException>(() => session.Generate("a\0b"));
                Throws<ArgumentException>(() => session.Generate("a\uD83Db"));
                Throws<ArgumentException>(() => session.Generate(""));
            }
        }

        private static void JsonIsReadStrictly()
        {
            JsonValue found = Json(" {\"a\": [1, -2.5e1, true, null, \"\\u00e9\\n\\uD83D\\uDE00\"], \"b\": {}} ");
            IReadOnlyList<JsonValue> items = found["a"].Items;
            Require(items[0].Integer == 1 && items[0].Number == 1 && items[1].Number == -25, "numbers");
            Require(items[3].IsNull && !items[2].IsNull && items[4].Text == "é\n😀", "words and texts");
            Require(found["b"].Members.Count == 0 && !items[1].IsInteger, "an empty object");
            foreach (string wrong in new[]
            {
                "", "{", "[1,]", "[1 2]", "{\"a\" 1}", "{\"a\":1,}", "{\"a\":1,\"a\":2}", "01", "1.", ".5", "+1", "1e", "-",
                "1e999", "NaN", "tru", "\"a", "\"\\x\"", "\"\\u12g4\"", "\"\t\"", "1 2", "'a'", new string('[', 200),
            })
                Throws<FormatException>(() => new JsonReader("test", wrong).ReadAll());
            Throws<InvalidDataException>(() => found["c"].Text.ToString());
            Throws<InvalidDataException>(() => found["a"].Text.ToString());
        }

        private static void RandomNumbersAreSplitMix64()
        {
            var numbers = new double[3];
            SplitMix64.Fill(numbers, 0, 0);
            ulong[] first = { 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F };  // from the reference implementation
            Require(numbers.SequenceEqual(first.Select(z => (z >> 11) * (1.0 / (1UL << 53)))), "of seed 0");
            SplitMix64.Fill(numbers, 0, 1);
            Require(numbers[0] == (first[1] >> 11) * (1.0 / (1UL << 53)), "from the second on");
        }

        private static void SettingsOutOfRangeAreRefused()
        {
            using (var session = new SpeculativeSession(_folder))
                foreach (var options in new[]
                {
                    new GenerationOptions { MaxNewTokens = 0 }, new GenerationOptions { Temperature = -1 },
                    new GenerationOptions { Temperature = float.NaN }, new GenerationOptions { TopK = -1 },
                    new GenerationOptions { TopP = 0 }, new GenerationOptions { TopP = 1.5 },
                    new GenerationOptions { MinP = 2 }, new GenerationOptions { RepetitionPenalty = 0 },
                })
                    Throws<ArgumentException>(() => session.Generate(Prompt, options));
        }

        private static JsonValue Json(string text) => new JsonReader("test", text).ReadAll();

        private static long[] Written(SpeculativeSession session, IReadOnlyList<long> prompt, GenerationOptions options = null) =>
            session.Rounds(prompt, options ?? new GenerationOptions { MaxNewTokens = 24 }).SelectMany(round => round.Tokens).ToArray();

        private static long Resident()
        {
            using (Process self = Process.GetCurrentProcess())
                return self.WorkingSet64;
        }

        private static void Require(bool holds, string what)
        {
            if (!holds)
                throw new Exception(what);
        }

        private static void Throws<T>(Action call) where T : Exception
        {
            try
            {
                call();
            }
            catch (T)
            {
                return;
            }
            throw new Exception($"no {typeof(T).Name}");
        }
    }
}
