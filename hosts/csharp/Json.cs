// Strict JSON reader for .NET and Mono, which has none without packages.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Text;
using System.Text.RegularExpressions;

namespace SpecEdge
{
    /// <summary>A value in a JSON file. Missing keys and wrong types raise an InvalidDataException.</summary>
    public sealed class JsonValue
    {
        private readonly string _place;
        private readonly object _value;

        internal JsonValue(string place, object value)
        {
            _place = place;
            _value = value;
        }

        public bool IsNull => _value == null;

        public bool IsInteger => _value is long;

        public string Text => As<string>("a text");

        public long Integer => As<long>("an integer");

        public double Number => _value is long ? (long)_value : As<double>("a number");

        public IReadOnlyList<JsonValue> Items => As<List<JsonValue>>("a list");

        public IReadOnlyDictionary<string, JsonValue> Members => As<Dictionary<string, JsonValue>>("an object");

        public JsonValue this[string key] =>
            Members.TryGetValue(key, out var found) ? found : throw new InvalidDataException(
                $"{_place} has no '{key}'; the bundle may be damaged, or of another format");

        private T As<T>(string wanted) => _value is T ? (T)_value : throw new InvalidDataException(
            $"{_place} must be {wanted}; the bundle may be damaged, or of another format");

        /// <summary>Reads a file, given by its path relative to the folder.</summary>
        public static JsonValue Read(string folder, string file)
        {
            try
            {
                byte[] bytes = File.ReadAllBytes(Path.Combine(folder, file));
                return new JsonReader(file, new UTF8Encoding(false, true).GetString(bytes)).ReadAll();
            }
            catch (Exception e) when (e is FormatException || e is ArgumentException)
            {
                throw new InvalidDataException($"{Path.Combine(folder, file)} is not JSON: {e.Message}");
            }
        }
    }

    /// <summary>Recursive descent parser (RFC 8259); a FormatException has the position.</summary>
    internal sealed class JsonReader
    {
        private const int MaxDepth = 100;

        private static readonly Regex Number =
            new Regex(@"\G-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", RegexOptions.CultureInvariant);

        private readonly string _file;
        private readonly string _text;
        private int _at;

        internal JsonReader(string file, string text)
        {
            _file = file;
            _text = text;
        }

        internal JsonValue ReadAll()
        {
            JsonValue value = ReadValue(_file, 0);
            return Peek() == '\0' && _at == _text.Length ? value : throw Unexpected();
        }

        private JsonValue ReadValue(string place, int depth)
        {
            if (depth > MaxDepth)
                throw new FormatException("nested too deeply");
            char next = Peek();
            if (next == '{')
                return new JsonValue(place, ReadObject(place, depth));
            if (next == '[')
                return new JsonValue(place, ReadList(place, depth));
            if (next == '"')
                return new JsonValue(place, ReadText());
            if (next == '-' || char.IsDigit(next))
                return new JsonValue(place, ReadNumber());
            foreach (string word in new[] { "null", "true", "false" })
            {
                if (string.CompareOrdinal(_text, _at, word, 0, word.Length) != 0)
                    continue;
                _at += word.Length;
                return new JsonValue(place, word == "null" ? null : (object)(word == "true"));
            }
            throw Unexpected();
        }

        private Dictionary<string, JsonValue> ReadObject(string place, int depth)
        {
            var members = new Dictionary<string, JsonValue>();
            for (bool first = true; !Ends('}', first); first = false)
            {
                if (Peek() != '"')
                    throw Unexpected();
                string key = ReadText();
                Take(':');
                if (members.ContainsKey(key))
                    throw new FormatException($"'{key}' occurs twice in {place}");
                members[key] = ReadValue(depth == 0 ? $"{place}: '{key}'" : $"{place} '{key}'", depth + 1);
            }
            return members;
        }

        private List<JsonValue> ReadList(string place, int depth)
        {
            var items = new List<JsonValue>();
            for (bool first = true; !Ends(']', first); first = false)
                items.Add(ReadValue($"{place} [{items.Count}]", depth + 1));
            return items;
        }

        /// <summary>Returns true at the end of a list or object; otherwise skips the separator.</summary>
        private bool Ends(char end, bool first)
        {
            if (first)
                _at++;
            if (Peek() == end)
            {
                _at++;
                return true;
            }
            if (!first)
                Take(',');
            return false;
        }

        private string ReadText()
        {
            var text = new StringBuilder();
            for (_at++; _at < _text.Length && _text[_at] >= ' '; _at++)
            {
                if (_text[_at] == '"')
                {
                    _at++;
                    return text.ToString();
                }
                text.Append(_text[_at] == '\\' ? ReadEscape() : _text[_at]);
            }
            throw Unexpected();
        }

        private char ReadEscape()
        {
            _at++;
            int simple = _at < _text.Length ? "\"\\/bfnrt".IndexOf(_text[_at]) : -1;
            if (simple >= 0)
                return "\"\\/\b\f\n\r\t"[simple];
            if (_at + 4 >= _text.Length || _text[_at] != 'u' || !ushort.TryParse(_text.Substring(_at + 1, 4),
                    NumberStyles.AllowHexSpecifier, CultureInfo.InvariantCulture, out ushort unit))
                throw Unexpected();
            _at += 4;
            return (char)unit;
        }

        private object ReadNumber()
        {
            Match number = Number.Match(_text, _at);
            _at += number.Length;
            bool integer = !number.Groups[1].Success && !number.Groups[2].Success;
            if (integer && long.TryParse(number.Value, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out long whole))
                return whole;
            bool valid = double.TryParse(number.Value, NumberStyles.Float, CultureInfo.InvariantCulture, out double real);
            return valid && !double.IsInfinity(real) ? real : throw Unexpected();
        }

        private char Peek()
        {
            while (_at < _text.Length && " \t\r\n".IndexOf(_text[_at]) >= 0)
                _at++;
            return _at < _text.Length ? _text[_at] : '\0';
        }

        private void Take(char wanted)
        {
            if (Peek() != wanted)
                throw Unexpected();
            _at++;
        }

        private FormatException Unexpected() =>
            new FormatException(_at < _text.Length ? $"unexpected '{_text[_at]}' at {_at}" : "it ends too early");
    }
}
