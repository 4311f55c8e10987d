/* Conformance vectors (golden transcripts): docs/hosts.md. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"
#include "utf8.h"

typedef struct {
    json_t *prompt_tokens, *tokens, *num_accepted;
    char *text;
    size_t text_size;
    Utf8 utf8;
} Written;

static void append(json_t *array, const int64_t *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) json_array_append_new(array, json_integer(values[i]));
}

static bool collect(void *user, const SpecedgeRound *round) {
    Written *written = user;
    append(written->tokens, round->tokens, round->num_tokens);
    append(written->num_accepted, &round->num_accepted, round->num_tokens > 0);
    written->text = realloc(written->text, written->text_size + 3 * round->num_bytes + 6);
    written->text_size += utf8_add(&written->utf8, round->bytes, round->num_bytes,
                                   written->text + written->text_size);
    return !is_interrupted;
}

#define NUMBER(key) json_number_value(json_object_get(transcript, key))

/* Generate the text of a transcript. */
static bool rewrite(SpecedgeHost *host, const json_t *transcript, Written *written,
                    bool *has_text) {
    SpecedgeSettings settings = {
        .max_new_tokens = (int64_t)NUMBER("max_new_tokens"),
        .temperature = (float)NUMBER("temperature"),
        .top_k = (int64_t)NUMBER("top_k"),
        .top_p = NUMBER("top_p"),
        .min_p = (float)NUMBER("min_p"),
        .repetition_penalty = (float)NUMBER("repetition_penalty"),
        .seed = (uint64_t)NUMBER("seed"),
    };
    const json_t *ids = json_object_get(transcript, "prompt_tokens"), *id;
    int64_t *own = calloc(json_array_size(ids) + 1, sizeof *own), num_tokens = 0;
    const int64_t *tokens = own;
    size_t i;
    *has_text = specedge_encode(host, json_string_value(json_object_get(transcript, "prompt")),
                                &tokens, &num_tokens);
    if (!*has_text) json_array_foreach(ids, i, id) own[num_tokens++] = json_integer_value(id);
    append(written->prompt_tokens, tokens, num_tokens);
    bool done = specedge_generate(host, tokens, num_tokens, &settings, collect, written);
    if (done) written->text_size += utf8_end(&written->utf8, written->text + written->text_size);
    free(own);
    return done;
}

/* Return the first difference from a transcript, or NULL. */
static const char *difference(const json_t *transcript, const Written *written, bool has_text) {
    const json_t *text = json_object_get(transcript, "text");
    if (!json_equal(json_object_get(transcript, "prompt_tokens"), written->prompt_tokens))
        return "prompt_tokens";
    if (!json_equal(json_object_get(transcript, "tokens"), written->tokens)) return "tokens";
    if (!json_equal(json_object_get(transcript, "num_accepted"), written->num_accepted))
        return "num_accepted";
    bool is_same = written->text_size == json_string_length(text) &&
                   !memcmp(written->text, json_string_value(text), written->text_size);
    return has_text && !is_same ? "text" : NULL;
}

static bool replay(SpecedgeHost *host, const json_t *transcript) {
    Written written = {.prompt_tokens = json_array(), .tokens = json_array(),
                       .num_accepted = json_array(), .text = calloc(1, 4)};
    bool has_text = false, done = rewrite(host, transcript, &written, &has_text);
    const char *other = done ? difference(transcript, &written, has_text) : specedge_error(host);
    printf("%s K %.0f, temperature %g, seed %.0f%s%s%s\n", other ? "DIFFERS" : "same   ",
           NUMBER("num_draft_tokens"), NUMBER("temperature"), NUMBER("seed"),
           has_text ? "" : ", token ids alone", other ? ": " : "", other ? other : "");
    json_decref(written.prompt_tokens);
    json_decref(written.tokens);
    json_decref(written.num_accepted);
    free(written.text);
    return !other;
}

/* Opens one host per K. */
bool replay_golden(const char *bundle) {
    char path[4096];
    json_error_t error;
    snprintf(path, sizeof path, "%s/golden.json", bundle);
    json_t *file = json_load_file(path, 0, &error), *transcript;
    if (!file) fprintf(stderr, "error: %s is not read: %s; run specedge embed\n", path, error.text);
    SpecedgeHost *host = NULL;
    int64_t k = 0;
    size_t i = 0;
    bool is_right = true;
    json_array_foreach(json_object_get(file, "transcripts"), i, transcript) {
        int64_t wanted = (int64_t)NUMBER("num_draft_tokens");
        if (k != wanted) {
            if (host) specedge_close(host);
            host = open_host(bundle, k = wanted);
        }
        is_right &= host && replay(host, transcript);
    }
    if (host) specedge_close(host);
    json_decref(file);
    return is_right && i;
}
