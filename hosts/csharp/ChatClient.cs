// A chat client modeled after Microsoft.Extensions.AI's IChatClient; the README has an adapter.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace SpecEdge
{
    /// <summary>A message; the role is "system", "user" or "assistant".</summary>
    public sealed class ChatTurn
    {
        public ChatTurn(string role, string text)
        {
            Role = role;
            Text = text;
        }

        public string Role { get; }
        public string Text { get; }
    }

    /// <summary>A chat client.</summary>
    public interface ILocalChatClient : IDisposable
    {
        Task<string> GetResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null, CancellationToken cancellation = default);

        IAsyncEnumerable<string> GetStreamingResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null, CancellationToken cancellation = default);
    }

    /// <summary>A chat client over a session; a conversation that continues reuses the caches.</summary>
    public sealed class SpeculativeChatClient : ILocalChatClient
    {
        private readonly SpeculativeSession _session;
        private readonly Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> _template;

        /// <summary>The template renders the prompt of a conversation, as the bundle's chat_template does in Jinja.</summary>
        public SpeculativeChatClient(
            SpeculativeSession session, Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> template)
        {
            _session = session;
            _template = template;
        }

        /// <summary>A template for models that only continue text: one line per turn.</summary>
        public static Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> Lines(SpeculativeSession session) =>
            turns => session.Encode(string.Concat(turns.Select(turn => turn.Text + "\n")));

        /// <summary>ChatML, the format of Qwen and others. Control tokens are token ids, so no text can imitate them.</summary>
        /// <remarks>For tokenizers that add no special tokens to a text, as in these models.</remarks>
        public static Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> ChatMl(
            SpeculativeSession session, string start = "<|im_start|>", string end = "<|im_end|>")
        {
            long from = session.Bundle.AddedToken(start), to = session.Bundle.AddedToken(end);
            IEnumerable<long> Turn(ChatTurn turn) => new[] { from }
                .Concat(session.Encode($"{turn.Role}\n{turn.Text}")).Append(to).Concat(session.Encode("\n"));
            return turns => turns.SelectMany(Turn).Append(from).Concat(session.Encode("assistant\n")).ToList();
        }

        public async Task<string> GetResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null, CancellationToken cancellation = default)
        {
            var text = new StringBuilder();
            await foreach (string piece in GetStreamingResponseAsync(turns, options, cancellation).ConfigureAwait(false))
                text.Append(piece);
            return text.ToString();
        }

        public async IAsyncEnumerable<string> GetStreamingResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null,
            [EnumeratorCancellation] CancellationToken cancellation = default)
        {
            IReadOnlyList<long> prompt = _template(turns.ToList());
            await foreach (string piece in _session.GenerateAsync(prompt, options, cancellation).ConfigureAwait(false))
                yield return piece;
        }

        public void Dispose() => _session.Dispose();
    }
}
