/* The loop of docs/hosts.md over round.onnx with K draft tokens per round and a vocabulary of V tokens.
 * Functions that return false have set host->error. */
#define _GNU_SOURCE /* strverscmp */
#include "specedge_host.h"

#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bundle.h"

enum { API = 17 /* ONNX Runtime 1.17 and later */, MOST_DRAFTED = 64 };
enum { PIECE = 256 /* tokens of a long prompt per pass */ };
enum End { INPUT, OUTPUT };
#define BOOL ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL
#define INT64 ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
#define FLOAT ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
#define DOUBLE ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE

struct SpecedgeHost {
    char error[512];
    const char *folder;
    Bundle bundle;
    const OrtApi *ort;
    OrtEnv *env;
    OrtSessionOptions *options;
    OrtAllocator *allocator;
    const OrtMemoryInfo *memory;         /* CPU memory */
    OrtSession *round, *encode, *decode; /* encode and decode are NULL without text graphs */
    OrtIoBinding *binding;               /* inputs and outputs of the round, with its caches */
    OrtSession *open;                    /* of an encoder-decoder's source, or NULL */
    OrtIoBinding *opening;               /* its outputs are constant states of the round */
    OrtValue *given, *result;            /* input and output of encode and decode */
    json_int_t k;
    int64_t *text, length;
    int64_t *source, source_length; /* of the constant states; 0 if they are undefined */
    char *bytes; /* of the last round */
    /* Inputs and outputs of the round, by name. */
    SpecedgeSettings settings;
    int64_t draft_length, target_length, num_draft_tokens, prompt_length;
    bool *seen, reads_text; /* the round has inputs text and prompt_length */
    double uniforms[2 * MOST_DRAFTED + 1];
    int64_t next_tokens[MOST_DRAFTED + 1], num_accepted;
};

static bool fail(SpecedgeHost *host, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(host->error, sizeof host->error, format, values);
    va_end(values);
    host->error[strcspn(host->error, "\n")] = 0;
    host->length = 0; /* the contents of the caches are undefined */
    return false;
}

static bool ok(SpecedgeHost *host, OrtStatus *status) {
    if (status) fail(host, "ONNX Runtime: %s", host->ort->GetErrorMessage(status));
    if (status) host->ort->ReleaseStatus(status);
    return !status;
}

/* Call a function of ONNX Runtime; return from the caller on failure. */
#define TRY(host, call) \
    if (!ok((host), (host)->ort->call)) return false

/* Return true if a number is in a range; NaN is not. */
static bool check(SpecedgeHost *host, const char *what, double value, double least, double most) {
    return (value >= least && value <= most) ||
           fail(host, "%s must be from %g to %g, got %g", what, least, most, value);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Random number i of a seed: splitmix64. */
static double uniform(uint64_t seed, uint64_t i) {
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static bool open_runtime(SpecedgeHost *host, const OrtApiBase *base, const char *extensions) {
    const char *key, *version = base->GetVersionString(), *oldest = host->bundle.oldest_onnxruntime;
    json_t *value;
    if (strverscmp(version, oldest) < 0 || !(host->ort = base->GetApi(API)))
        return fail(host, "ONNX Runtime is %s, the bundle needs %s", version, oldest);
    TRY(host, CreateEnv(ORT_LOGGING_LEVEL_FATAL, "specedge", &host->env));
    TRY(host, GetAllocatorWithDefaultOptions(&host->allocator));
    TRY(host, AllocatorGetInfo(host->allocator, &host->memory));
    TRY(host, CreateSessionOptions(&host->options));
    json_object_foreach(host->bundle.session_options, key, value)
        TRY(host, AddSessionConfigEntry(host->options, key, json_string_value(value)));
    if (extensions) TRY(host, RegisterCustomOpsLibrary_V2(host->options, extensions));
    return true;
}

static bool open_session(SpecedgeHost *host, const json_t *graph, OrtSession **session) {
    char path[4096];
    const char *file = json_string_value(json_object_get(graph, "file"));
    if (!file || !json_object_get(host->bundle.files, file))
        return fail(host, "bundle.json does not list a graph's file: %s", file);
    snprintf(path, sizeof path, "%s/%s", host->folder, file);
    return ok(host, host->ort->CreateSession(host->env, path, host->options, session));
}

/* Bind `count` numbers, of shape [count] or [1, count], to an input or output. */
static bool bind_to(SpecedgeHost *host, OrtIoBinding *binding, enum End end, const char *name,
                    void *memory, ONNXTensorElementDataType type, int rank, int64_t count) {
    OrtValue *value = NULL;
    int64_t shape[] = {1, count};
    size_t size = count * (type == BOOL ? 1 : type == FLOAT ? 4 : 8);
    TRY(host, CreateTensorWithDataAsOrtValue(host->memory, memory, size, shape + 2 - rank, rank,
                                             type, &value));
    bool is_bound = ok(host, end == OUTPUT ? host->ort->BindOutput(binding, name, value)
                                           : host->ort->BindInput(binding, name, value));
    host->ort->ReleaseValue(value); /* the binding holds a reference */
    return is_bound;
}

/* Bind numbers to an input or output of the round. */
static bool bind(SpecedgeHost *host, enum End end, const char *name, void *memory,
                 ONNXTensorElementDataType type, int rank, int64_t count) {
    return bind_to(host, host->binding, end, name, memory, type, rank, count);
}

/* Bind a buffer to all outputs that write a state. */
static bool bind_outputs(SpecedgeHost *host, OrtIoBinding *binding, json_t *outputs,
                         const char *state, OrtValue *cache) {
    const char *name, *written;
    size_t i;
    json_t *output;
    json_array_foreach(outputs, i, output)
        if (!json_unpack(output, "{s:s, s:s}", "name", &name, "state", &written) &&
            !strcmp(state, written))
            TRY(host, BindOutput(binding, name, cache));
    return true;
}

/* Bind one zeroed buffer to the input and all outputs of a state, so that runs write only new rows. */
static bool bind_cache(SpecedgeHost *host, json_t *input, json_t *outputs, json_t *opened) {
    const char *name, *state;
    size_t i, size = sizeof(float);
    int64_t shape[4];
    json_t *sizes;
    OrtValue *cache = NULL;
    void *data;
    if (json_unpack(input, "{s:s, s:s, s:o}", "name", &name, "state", &state, "shape", &sizes))
        return true; /* the state is null except for caches */
    for (i = 0; i < 4; i++) size *= shape[i] = json_integer_value(json_array_get(sizes, i));
    TRY(host, CreateTensorAsOrtValue(host->allocator, shape, 4, FLOAT, &cache));
    bool is_bound = ok(host, host->ort->GetTensorMutableData(cache, &data)) &&
                    ok(host, host->ort->BindInput(host->binding, name, cache));
    if (is_bound && size) memset(data, 0, size);
    is_bound = is_bound && bind_outputs(host, host->binding, outputs, state, cache) &&
               bind_outputs(host, host->opening, opened, state, cache);
    host->ort->ReleaseValue(cache);
    return is_bound;
}

static bool open_round(SpecedgeHost *host, const json_t *graph, const json_t *open) {
    json_t *inputs = NULL, *outputs = NULL, *opened = NULL, *input;
    SpecedgeSettings *settings = &host->settings;
    size_t i;
    json_unpack((json_t *)graph, "{s:I, s:{s:o, s:o}}", "num_draft_tokens", &host->k, "signature",
                "inputs", &inputs, "outputs", &outputs);
    if (!check(host, "num_draft_tokens", host->k, 1, MOST_DRAFTED)) return false;
    if (!open_session(host, graph, &host->round)) return false;
    TRY(host, CreateIoBinding(host->round, &host->binding));
    if (open) {
        if (!has_input(open, "source")) return fail(host, "the bundle reads speech, not text");
        opened = json_object_get(json_object_get(open, "signature"), "outputs");
        if (!open_session(host, open, &host->open)) return false;
        TRY(host, CreateIoBinding(host->open, &host->opening));
        if (!bind(host, INPUT, "source_length", &host->source_length, INT64, 1, 1)) return false;
    }
    json_array_foreach(inputs, i, input)
        if (!bind_cache(host, input, outputs, opened)) return false;
    host->reads_text = has_input(graph, "text_tokens");
    if (host->reads_text && !bind(host, INPUT, "prompt_length", &host->prompt_length, INT64, 1, 1))
        return false;
    return bind(host, INPUT, "draft_length", &host->draft_length, INT64, 1, 1) &&
           bind(host, INPUT, "target_length", &host->target_length, INT64, 1, 1) &&
           bind(host, INPUT, "num_draft_tokens", &host->num_draft_tokens, INT64, 1, 1) &&
           bind(host, INPUT, "temperature", &settings->temperature, FLOAT, 1, 1) &&
           bind(host, INPUT, "top_k", &settings->top_k, INT64, 1, 1) &&
           bind(host, INPUT, "top_p", &settings->top_p, DOUBLE, 1, 1) &&
           bind(host, INPUT, "min_p", &settings->min_p, FLOAT, 1, 1) &&
           bind(host, INPUT, "repetition_penalty", &settings->repetition_penalty, FLOAT, 1, 1) &&
           bind(host, INPUT, "seen", host->seen, BOOL, 2, host->bundle.vocab_size) &&
           bind(host, INPUT, "uniforms", host->uniforms, DOUBLE, 1, 2 * host->k + 1) &&
           bind(host, OUTPUT, "next_tokens", host->next_tokens, INT64, 1, host->k + 1) &&
           bind(host, OUTPUT, "num_accepted", &host->num_accepted, INT64, 1, 1);
}

static bool open_graphs(SpecedgeHost *host, bool has_text) {
    const json_t *round = find_graph(&host->bundle, "round", host->k);
    const json_t *encode = find_graph(&host->bundle, "encode", 0);
    const json_t *decode = find_graph(&host->bundle, "decode", 0);
    const json_t *open = find_graph(&host->bundle, "open", 0);
    if (!round)
        return fail(host, "%s has no round.onnx of K = %lld draft tokens (0: any); run specedge "
                    "embed --layout fused -k K", host->folder, (long long)host->k);
    bool is_invariant = !json_array_size(host->bundle.pass_boundaries); /* flash attention */
#ifdef __aarch64__
    is_invariant = false;
#endif
    if (!is_invariant) setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1", 0);
    host->text = calloc(host->bundle.context_length, sizeof *host->text);
    host->seen = calloc(host->bundle.vocab_size, sizeof *host->seen);
    host->source = calloc(host->bundle.max_source_length + 1, sizeof *host->source);
    return open_round(host, round, open) &&
           (!has_text || !encode || open_session(host, encode, &host->encode)) &&
           (!has_text || !decode || open_session(host, decode, &host->decode));
}

SpecedgeHost *specedge_open(const char *bundle, int64_t k, const OrtApiBase *onnxruntime,
                            const char *extensions) {
    SpecedgeHost *host = calloc(1, sizeof *host);
    host->folder = bundle;
    host->k = k;
    if (read_bundle(&host->bundle, bundle, host->error, sizeof host->error) &&
        open_runtime(host, onnxruntime, extensions))
        open_graphs(host, extensions != NULL);
    return host;
}

void specedge_close(SpecedgeHost *host) {
    if (host->ort) {
        host->ort->ReleaseValue(host->given);
        host->ort->ReleaseValue(host->result);
        host->ort->ReleaseIoBinding(host->binding);
        host->ort->ReleaseIoBinding(host->opening);
        host->ort->ReleaseSession(host->round);
        host->ort->ReleaseSession(host->open);
        host->ort->ReleaseSession(host->encode);
        host->ort->ReleaseSession(host->decode);
        host->ort->ReleaseSessionOptions(host->options);
        host->ort->ReleaseEnv(host->env);
    }
    json_decref(host->bundle.manifest);
    free(host->text);
    free(host->source);
    free(host->seen);
    free(host->bytes);
    free(host);
}

const char *specedge_error(const SpecedgeHost *host) { return host->error; }

/* Run encode or decode on host->given, and free that. */
static bool call(SpecedgeHost *host, OrtSession *session, const char *input, const char *output) {
    const OrtValue *given = host->given;
    host->ort->ReleaseValue(host->result);
    host->result = NULL;
    bool is_run = ok(host, host->ort->Run(session, NULL, &input, &given, 1, &output, 1,
                                          &host->result));
    host->ort->ReleaseValue(host->given);
    host->given = NULL;
    return is_run;
}

bool specedge_encode(SpecedgeHost *host, const char *text, const int64_t **tokens,
                     int64_t *num_tokens) {
    OrtTensorTypeAndShapeInfo *info;
    int64_t shape[] = {1, 0}; /* shape of the text, then of its tokens */
    if (!host->encode)
        return fail(host, "the bundle supports token ids only: %s", host->bundle.ids_only ?
                    host->bundle.ids_only : "no path of libortextensions.so was given");
    TRY(host, CreateTensorAsOrtValue(host->allocator, shape, 1,
                                     ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING, &host->given));
    TRY(host, FillStringTensor(host->given, &text, 1));
    if (!call(host, host->encode, "text", "tokens")) return false;
    TRY(host, GetTensorMutableData(host->result, (void **)tokens));
    TRY(host, GetTensorTypeAndShape(host->result, &info));
    bool is_known = ok(host, host->ort->GetDimensions(info, shape, 2));
    host->ort->ReleaseTensorTypeAndShapeInfo(info);
    *num_tokens = shape[1];
    return is_known;
}

/* Decode a round's tokens one by one, since the library truncates text at NUL. */
static bool decode(SpecedgeHost *host, SpecedgeRound *round) {
    for (int64_t i = 0, one = 1; i < round->num_tokens; i++) {
        size_t start = round->num_bytes, length;
        TRY(host, CreateTensorWithDataAsOrtValue(host->memory, (int64_t *)&round->tokens[i],
                                                 sizeof(int64_t), &one, 1, INT64, &host->given));
        if (!call(host, host->decode, "tokens", "text")) return false;
        TRY(host, GetStringTensorElementLength(host->result, 0, &length));
        round->bytes = host->bytes = realloc(host->bytes, start + length + 1);
        TRY(host, GetStringTensorElement(host->result, length, 0, host->bytes + start));
        round->num_bytes += length;
    }
    return true;
}

/* Feed the tokens up to `end` that the caches lack, and accept at most n draft tokens. */
static bool run(SpecedgeHost *host, int64_t end, int64_t n) {
    host->num_draft_tokens = n;
    int64_t *fed = host->text + host->draft_length;
    if (host->reads_text && !bind(host, INPUT, "text_tokens", host->text, INT64, 2, host->length))
        return false;
    return bind(host, INPUT, "tokens", fed, INT64, 2, end - host->draft_length) &&
           ok(host, host->ort->RunWithBinding(host->round, NULL, host->binding));
}

/* Append the tokens of a round: at most `wanted`, and none after an end token. */
static void take(SpecedgeHost *host, int64_t wanted, bool *is_over) {
    int64_t first = host->length;
    for (int64_t i = 0; i < least(host->num_accepted + 1, wanted) && !*is_over; i++) {
        int64_t token = host->text[host->length++] = host->next_tokens[i];
        host->seen[token] = true;
        for (size_t j = 0; j < json_array_size(host->bundle.end_tokens); j++)
            *is_over |= token == json_integer_value(json_array_get(host->bundle.end_tokens, j));
    }
    host->target_length = host->length - 1;
    host->draft_length = least(host->target_length, first + host->k - 1);
}

/* Apply the settings, and keep the common prefix of the caches and the prompt. */
static bool begin(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                  const SpecedgeSettings *s) {
    if (!check(host, "max_new_tokens", s->max_new_tokens, 0, INT64_MAX) ||
        !check(host, "temperature", s->temperature, 0, FLT_MAX) ||
        !check(host, "top_k", s->top_k, 0, INT64_MAX) ||
        !check(host, "top_p", s->top_p, DBL_MIN, 1) || !check(host, "min_p", s->min_p, 0, 1) ||
        !check(host, "repetition_penalty", s->repetition_penalty, FLT_MIN, FLT_MAX) ||
        !check(host, "the number of prompt tokens", num_tokens, 1, host->bundle.context_length - 1))
        return false;
    for (int64_t i = 0; i < num_tokens; i++)
        if (!check(host, "a token", prompt[i], 0, host->bundle.vocab_size - 1)) return false;
    int64_t common = 0, most = least(host->length, num_tokens - 1);
    while (common < most && host->text[common] == prompt[common]) common++;
    host->draft_length = least(host->draft_length, common);
    host->target_length = least(host->target_length, common);
    host->settings = *s;
    host->length = host->prompt_length = num_tokens;
    memmove(host->text, prompt, num_tokens * sizeof *prompt);
    memset(host->seen, 0, host->bundle.vocab_size);
    for (int64_t i = 0; i < num_tokens; i++) host->seen[prompt[i]] = true;
    return true;
}

/* Compute the constant states of a source, unless they are its own. */
static bool open_source(SpecedgeHost *host, const int64_t *source, int64_t num_tokens) {
    if (!check(host, "the number of source tokens", num_tokens, 1, host->bundle.max_source_length))
        return false;
    for (int64_t i = 0; i < num_tokens; i++)
        if (!check(host, "a token", source[i], 0, host->bundle.vocab_size - 1)) return false;
    size_t size = num_tokens * sizeof *source;
    if (num_tokens == host->source_length && !memcmp(host->source, source, size)) return true;
    host->length = host->source_length = 0;
    memcpy(host->source, source, size);
    if (!bind_to(host, host->opening, INPUT, "source", host->source, INT64, 2, num_tokens))
        return false;
    TRY(host, RunWithBinding(host->open, NULL, host->opening));
    host->source_length = num_tokens;
    return true;
}

/* Begin the text of an encoder-decoder, whose prompt is the source. */
static bool begin_decoder(SpecedgeHost *host, const int64_t *source, int64_t num_tokens,
                          const SpecedgeSettings *s) {
    json_t *parts[] = {host->bundle.decoder_start, host->bundle.decoder_prefix}, *token;
    size_t i, most = json_array_size(parts[0]) + json_array_size(parts[1]);
    int64_t *first = calloc(most + 1, sizeof *first), length = 0;
    if (!first)
        return fail(host, "out of memory");
    for (int part = 0; part < 2; part++)
        json_array_foreach(parts[part], i, token) first[length++] = json_integer_value(token);
    bool is_begun = open_source(host, source, num_tokens) && begin(host, first, length, s);
    free(first);
    return is_begun;
}

bool specedge_generate(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                       const SpecedgeSettings *s, SpecedgeOnRound *on_round, void *user) {
    if (!(host->open ? begin_decoder : begin)(host, prompt, num_tokens, s)) return false;
    int64_t room = host->bundle.context_length - host->length;
    int64_t limit = host->length + least(s->max_new_tokens, room);
    uint64_t used = 0;
    for (bool is_over = false; !is_over && host->length < limit;) {
        int64_t first = host->length, wanted = limit - first;
        int64_t end = least(host->draft_length + PIECE,
                            next_boundary(&host->bundle, host->draft_length));
        SpecedgeRound round = {0};
        if (end < first) { /* a piece of a long prompt */
            if (!run(host, end, 0)) return false;
            host->draft_length = host->target_length = end;
        } else {
            for (int i = 0; i <= 2 * host->k; i++) host->uniforms[i] = uniform(s->seed, used++);
            /* A sampled token's acceptance depends on the draft tokens after it. */
            int64_t most = s->temperature == 0 ? wanted - 1 : host->bundle.context_length - first;
            if (!run(host, first, least(host->k, most))) return false;
            take(host, wanted, &is_over);
            round = (SpecedgeRound){host->text + first, host->length - first,
                                    least(host->num_accepted, wanted), NULL, 0};
            if (host->decode && !decode(host, &round)) return false;
        }
        is_over |= !on_round(user, &round);
    }
    return true;
}
