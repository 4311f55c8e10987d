// A session behind an interface in the shape of Microsoft.Extensions.AI's IChatClient; the README has an adapter.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace SpecEdge
{
    /// <summary>What someone said: the role is "system", "user" or "assistant".</summary>
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

    /// <summary>Something that answers.</summary>
    public interface ILocalChatClient : IDisposable
    {
        Task<string> GetResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null, CancellationToken cancellation = default);

        IAsyncEnumerable<string> GetStreamingResponseAsync(
            IEnumerable<ChatTurn> turns, GenerationOptions options = null, CancellationToken cancellation = default);
    }

    /// <summary>A bundle that answers. A talk that goes on does so from the caches.</summary>
    public sealed class SpeculativeChatClient : ILocalChatClient
    {
        private readonly SpeculativeSession _session;
        private readonly Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> _template;

        /// <summary>The template makes a prompt of a talk, as the bundle's chat_template does in Jinja.</summary>
        public SpeculativeChatClient(
            SpeculativeSession session, Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> template)
        {
            _session = session;
            _template = template;
        }

        /// <summary>A template for models that only go on with a text: the turns, a line each.</summary>
        public static Func<IReadOnlyList<ChatTurn>, IReadOnlyList<long>> Lines(SpeculativeSession session) =>
            turns => session.Encode(string.Concat(turns.Select(turn => turn.Text + "\n")));

        /// <summary>ChatML, the template of Qwen and others. Its marks are token ids: no text can spell them.</summary>
        /// <remarks>For tokenizers that add no token to a text, as those of these models do not.</remarks>
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
