/* The loop of docs/hosts.md, with its letters: K draft tokens a round, L tokens of the text. */
#include "specedge_host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { PIECE = 256 /* tokens of a long prompt that are fed at once */ };

SpecedgeHost *specedge_open(const char *bundle, int64_t k, const char *onnxruntime,
                            const char *extensions) {
    SpecedgeHost *host = calloc(1, sizeof *host);
    host->folder = bundle;
    host->k = k;
    if (read_manifest(host)) open_graphs(host, onnxruntime, extensions);
    return host;
}

void specedge_close(SpecedgeHost *host) {
    close_graphs(host);
    json_decref(host->manifest);
    free(host);
}

const char *specedge_error(const SpecedgeHost *host) { return host->error; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Random number i of a seed: splitmix64. */
static double uniform(uint64_t seed, uint64_t i) {
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* ---- Text, where the bundle has encode.onnx and decode.onnx ---- */

/* The bytes of the first character of a text, and of what is none those that one U+FFFD stands for
 * (Unicode 3.9, "maximal subpart"); 0 if the character may go on behind the text. */
static size_t character(const char *text, size_t size, bool *is_valid) {
    const unsigned char *bytes = (const unsigned char *)text;
    unsigned char first = *bytes, low = 0x80, high = 0xBF;
    size_t length = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (first > 0xF4) length = 0;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
    size_t i = 1;
    for (; i < length && i < size && bytes[i] >= low && bytes[i] <= high; i++) {
        low = 0x80;
        high = 0xBF;
    }
    *is_valid = length && i == length;
    return i < length && i == size ? 0 : i;
}

/* Run a graph of one input, host->given, and one output, host->found; both live until the next. */
static bool call(SpecedgeHost *host, OrtSession *session, const char *input, const char *output) {
    host->ort->ReleaseValue(host->found);
    host->found = NULL;
    TRY(host, Run(session, NULL, &input, (const OrtValue *const *)&host->given, 1, &output, 1,
                  &host->found));
    return true;
}

bool specedge_encode(SpecedgeHost *host, const char *text, int64_t **tokens, int64_t *num_tokens) {
    const char *reason = text_of(host->hosts, "ids_only");
    if (!host->encode)
        return fail(host, "only token ids can be taken: %s",
                    *reason ? reason : "no path of libortextensions.so was given");
    if (!*text) return fail(host, "the prompt is empty; give some text");
    bool is_valid = true;
    for (size_t i = 0, size = strlen(text), length; i < size && is_valid; i += length) {
        length = character(text + i, size - i, &is_valid);
        if (!is_valid) return fail(host, "the prompt is not UTF-8");
    }
    host->ort->ReleaseValue(host->given);
    host->given = NULL;
    TRY(host, CreateTensorAsOrtValue(host->allocator, (int64_t[]){1}, 1,
                                     ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING, &host->given));
    TRY(host, FillStringTensor(host->given, &text, 1));
    if (!call(host, host->encode, "text", "tokens")) return false;
    OrtTensorTypeAndShapeInfo *info;
    int64_t shape[2] = {0}, *ids;
    TRY(host, GetTensorMutableData(host->found, (void **)&ids));
    TRY(host, GetTensorTypeAndShape(host->found, &info));
    bool is_known = ok(host, host->ort->GetDimensions(info, shape, 2));
    host->ort->ReleaseTensorTypeAndShapeInfo(info);
    if (!is_known) return false;
    *num_tokens = shape[1];
    *tokens = malloc((shape[1] + 1) * sizeof *ids);
    memcpy(*tokens, ids, shape[1] * sizeof *ids);
    return true;
}

/* The text that bytes complete, those held back before included; the caller frees it. */
static char *completed(SpecedgeHost *host, const char *bytes, size_t size, size_t *text_size) {
    char *text = malloc(3 * size + 1), *end = text;
    bool is_valid;
    for (size_t i = 0, length; i < size; i += length) {
        length = character(bytes + i, size - i, &is_valid);
        if (!length) {
            memcpy(host->held, bytes + i, size - i);
            host->held[size - i] = 0;
            break;
        }
        memcpy(end, is_valid ? bytes + i : "\xEF\xBF\xBD", is_valid ? length : 3);
        end += is_valid ? length : 3;
    }
    *text_size = end - text;
    return text;
}

/* The text that the tokens from `first` on complete. */
static bool decode(SpecedgeHost *host, int64_t first, char **text, size_t *text_size) {
    int64_t count = host->length - first;
    size_t size, held = strlen(host->held);
    host->ort->ReleaseValue(host->given);
    host->given = NULL;
    TRY(host, CreateTensorWithDataAsOrtValue(host->memory, host->text + first, count * 8, &count, 1,
                                             ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &host->given));
    if (!call(host, host->decode, "tokens", "text")) return false;
    TRY(host, GetStringTensorElementLength(host->found, 0, &size));
    char *bytes = malloc(held + size + 1);
    memcpy(bytes, host->held, held);
    *host->held = 0;
    bool is_read = ok(host, host->ort->GetStringTensorElement(host->found, size, 0, bytes + held));
    *text = is_read ? completed(host, bytes, held + size, text_size) : NULL;
    free(bytes);
    return is_read;
}

/* ---- Rounds: each ends with next_tokens and num_accepted ---- */

static bool check_token(SpecedgeHost *host, int64_t token) {
    return (token >= 0 && token < host->vocab_size) ||
           fail(host, "token %lld is not between 0 and %lld", (long long)token,
                (long long)host->vocab_size - 1);
}

/* Feed the draft text[from:end]; it draws the next token with a random number. */
static bool run_draft(SpecedgeHost *host, int64_t from, int64_t end, double uniform) {
    host->draft_length = from - host->draft_start;
    host->uniform = uniform;
    return run_graph(host, &host->draft, from, end);
}

/* Feed the target what it lacks of text[:end]; the last K + 1 rows give logits. */
static bool run_target(SpecedgeHost *host, int64_t end) {
    host->logits_from = end - host->target_length - host->k - 1;
    return run_graph(host, &host->target, host->target_length, end);
}

static bool run_split_round(SpecedgeHost *host) {
    int64_t from = host->draft_start + host->draft_length;
    bool was_seen[MOST_DRAFTED];
    for (int64_t i = 0; i < host->k; from = host->length + i++) {
        if (!run_draft(host, from, host->length + i, host->uniforms[i])) return false;
        if (!check_token(host, host->token)) return false;
        host->drafted[i] = host->text[host->length + i] = host->token;
        memcpy(host->weights + i * host->vocab_size, host->row, host->vocab_size * sizeof(float));
        was_seen[i] = host->seen[host->token];
        host->seen[host->token] = true;
    }
    for (int64_t i = host->k; i-- > 0;) host->seen[host->drafted[i]] = was_seen[i];
    return run_target(host, host->length + host->k) && run_graph(host, &host->accept, 0, 0);
}

/* Feed one piece of a long prompt, where more than a piece is left of it. */
static bool read_piece(SpecedgeHost *host, bool *was_left) {
    int64_t from = host->draft_start + host->draft_length, until = host->length - PIECE;
    *was_left = from < until || host->target_length < until;
    host->num_draft_tokens = 0;
    if (host->round.session && from < until) {
        if (!run_graph(host, &host->round, from, from + PIECE)) return false;
        host->draft_length = host->target_length = from + PIECE;
    } else if (from < until) {
        if (!run_draft(host, from, from + PIECE, 0)) return false;
        host->draft_length += PIECE;
    } else if (host->target_length < until) {
        if (!run_target(host, host->target_length + PIECE)) return false;
        host->target_length += PIECE;
    }
    return true;
}

/* A draft of a shorter context has the text from here on in its cache: docs/bundle.md. */
static void place_draft(SpecedgeHost *host) {
    int64_t context = host->draft_context_length, step = context - context / 2;
    int64_t over = host->length - context, start = over > 0 ? (over + step - 1) / step * step : 0;
    if (start != host->draft_start) host->draft_length = 0;
    host->draft_start = start;
}

/* Put what a round wrote behind the text: `wanted` tokens at most, and none behind an end token. */
static bool take(SpecedgeHost *host, int64_t wanted, bool *is_over) {
    const json_t *ends = json_object_get(host->manifest, "end_tokens");
    int64_t first = host->length;
    if (host->num_accepted < 0 || host->num_accepted > host->k)
        return fail(host, "%lld of %lld draft tokens were accepted", (long long)host->num_accepted,
                    (long long)host->k);
    for (int64_t i = 0; i < least(host->num_accepted + 1, wanted) && !*is_over; i++) {
        int64_t token = host->text[host->length++] = host->next_tokens[i];
        if (!check_token(host, token)) return false;
        host->seen[token] = true;
        for (size_t j = 0; j < json_array_size(ends); j++)
            *is_over |= token == json_integer_value(json_array_get(ends, j));
    }
    host->num_accepted = least(host->num_accepted, wanted);
    host->target_length = host->length - 1;
    host->draft_length = least(host->target_length, first + host->k - 1) - host->draft_start;
    return true;
}

static bool check(SpecedgeHost *host, double value, bool is_right, const char *wanted) {
    return (is_right && isfinite(value)) || fail(host, "%s, got %g", wanted, value);
}

static bool check_settings(SpecedgeHost *host, const SpecedgeSettings *s) {
    double length = (double)s->max_new_tokens, top_k = (double)s->top_k, p = s->top_p, m = s->min_p;
    return check(host, length, length >= 0, "max_new_tokens must be at least 0") &&
           check(host, s->temperature, s->temperature >= 0, "temperature must be at least 0") &&
           check(host, top_k, top_k >= 0, "top_k must be at least 0") &&
           check(host, p, p > 0 && p <= 1, "top_p must be above 0, at most 1") &&
           check(host, m, m >= 0 && m <= 1, "min_p must be 0 to 1") &&
           check(host, s->repetition_penalty, s->repetition_penalty > 0,
                 "repetition_penalty must be above 0");
}

/* Take the settings, and of the caches what they have in common with the prompt. */
static bool begin(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                  const SpecedgeSettings *s) {
    if (!check_settings(host, s)) return false;
    if (num_tokens < 1) return fail(host, "the prompt is empty; give at least one token");
    if (num_tokens >= host->context_length)
        return fail(host, "the prompt has %lld tokens, the bundle takes %lld with at least one "
                    "new; shorten it", (long long)num_tokens, (long long)host->context_length);
    for (int64_t i = 0; i < num_tokens; i++)
        if (!check_token(host, prompt[i])) return false;
    int64_t common = 0;
    while (common < least(host->length, num_tokens - 1) && host->text[common] == prompt[common])
        common++;
    host->target_length = least(host->target_length, common);
    host->draft_length = least(host->draft_length, common - host->draft_start);
    if (host->draft_length < 0) host->draft_length = 0;
    memcpy(host->text, prompt, num_tokens * sizeof *prompt);
    host->length = num_tokens;
    memset(host->seen, 0, host->vocab_size);
    for (int64_t i = 0; i < num_tokens; i++) host->seen[prompt[i]] = true;
    host->temperature = (float)s->temperature;
    host->top_k = s->top_k;
    host->top_p = s->top_p;
    host->min_p = (float)s->min_p;
    host->repetition_penalty = (float)s->repetition_penalty;
    *host->held = 0;
    return true;
}

bool specedge_generate(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                       const SpecedgeSettings *settings, SpecedgeOnRound *on_round, void *user) {
    if (!begin(host, prompt, num_tokens, settings)) return false;
    int64_t limit = num_tokens + least(settings->max_new_tokens, host->context_length - num_tokens);
    uint64_t used = 0;
    bool is_over = false;
    while (!is_over && host->length < limit) {
        int64_t first = host->length, wanted = limit - first;
        bool was_left;
        place_draft(host);
        if (!read_piece(host, &was_left)) return false;
        if (was_left) {
            is_over = !on_round(user, NULL, 0, 0, "", 0);
            continue;
        }
        for (int64_t i = 0; i <= 2 * host->k; i++)
            host->uniforms[i] = uniform(settings->seed, used++);
        host->num_draft_tokens = least(host->k, wanted - (host->temperature == 0));
        host->num_draft_tokens = least(host->num_draft_tokens, /* what fits into its context */
                                       host->draft_start + host->draft_context_length - first + 1);
        if (!(host->round.session ? run_graph(host, &host->round, host->draft_length, first)
                                  : run_split_round(host)) ||
            !take(host, wanted, &is_over))
            return false;
        char *text = NULL;
        size_t text_size = 0;
        if (host->decode && !decode(host, first, &text, &text_size)) return false;
        is_over |= !on_round(user, host->text + first, host->length - first, host->num_accepted,
                             text ? text : "", text_size);
        free(text);
    }
    if (*host->held) on_round(user, NULL, 0, 0, "\xEF\xBF\xBD", 3);
    return true;
}
