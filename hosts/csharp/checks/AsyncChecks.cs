// Checks of streaming and the chat client, which need C# 8.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;

namespace SpecEdge
{
    internal static partial class Checks
    {
        static partial void AddChecksOfAsync(List<Action> checks)
        {
            checks.Add(AsyncTextIsTheSameText);
            checks.Add(AsyncTextCanBeCancelled);
            checks.Add(ChatClientAnswersFromTheCaches);
            checks.Add(ChatMarksAreTokensThatNoTextCanSpell);
        }

        private static void AsyncTextIsTheSameText() => Wait(async () =>
        {
            using var session = new SpeculativeSession(_folder);
            string wanted = string.Concat(session.Generate(Prompt)), found = "";
            await foreach (string piece in session.GenerateAsync(Prompt))
                found += piece;
            Require(found == wanted && found.Length > 0, found);
        });

        private static void AsyncTextCanBeCancelled() => Wait(async () =>
        {
            using var session = new SpeculativeSession(_folder);
            using var source = new CancellationTokenSource();
            int pieces = 0;
            try
            {
                await foreach (string _ in session.GenerateAsync(Prompt).WithCancellation(source.Token))
                    if (++pieces == 2)
                        source.Cancel();
                Require(false, "it was not cancelled");
            }
            catch (OperationCanceledException)
            {
                Require(pieces == 2, $"{pieces} pieces");
            }
            Require(string.Concat(session.Generate(Prompt)).Length > 0, "the session is usable");
        });

        private static void ChatClientAnswersFromTheCaches() => Wait(async () =>
        {
            using var session = new SpeculativeSession(_folder);
            using ILocalChatClient client = new SpeculativeChatClient(session, SpeculativeChatClient.Lines(session));
            var turns = new List<ChatTurn> { new ChatTurn("user", Prompt) };
            string answer = await client.GetResponseAsync(turns);
            Require(answer == string.Concat(session.Generate(Prompt + "\n")), answer);
            turns.Add(new ChatTurn("assistant", answer));
            turns.Add(new ChatTurn("user", "import os"));
            string streamed = "";
            await foreach (string piece in client.GetStreamingResponseAsync(turns))
                streamed += piece;
            Require(session.NumReused > 60, $"{session.NumReused} tokens were in the caches");
            Require(streamed == await client.GetResponseAsync(turns), streamed);
        });

        private static void ChatMarksAreTokensThatNoTextCanSpell()
        {
            const string mark = "<|endoftext|>";
            using var session = new SpeculativeSession(_folder);
            long token = session.Bundle.AddedToken(mark);
            Require(!session.Encode(mark).Contains(token), "a text spelled a control token");
            var template = SpeculativeChatClient.ChatMl(session, mark, mark);
            IReadOnlyList<long> prompt = template(new[] { new ChatTurn("user", $"a {mark} b") });
            Require(prompt.Count(one => one == token) == 3 && prompt[0] == token, string.Join(",", prompt));
            Throws<ArgumentException>(() => SpeculativeChatClient.ChatMl(session));
        }

        private static void Wait(Func<Task> check) => check().GetAwaiter().GetResult();
    }
}
