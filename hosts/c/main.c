/* The host's command line: README.md. */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "specedge_host.h"

static const char USAGE[] =
    "usage: specedge_host BUNDLE PROMPT [OPTIONS]        write text\n"
    "       specedge_host BUNDLE --ids 5,17,3 [OPTIONS]  take token ids and write token ids\n"
    "       specedge_host BUNDLE --golden                replay the bundle's golden.json\n"
    "options: -n/--max-new-tokens N, -k/--num-draft-tokens K, --temperature T, --top-k N,\n"
    "         --top-p P, --min-p P, --repetition-penalty R, --seed S\n";

static volatile sig_atomic_t is_interrupted;

static void interrupt(int signal) { is_interrupted = signal; }

static void refuse(const char *what, const char *value) {
    fprintf(stderr, "error: %s, got \"%s\"\n", what, value);
    exit(1);
}

static double number(const char *text, const char *what) {
    char *end;
    double found = strtod(text, &end);
    if (end == text || *end) refuse(what, text);
    return found;
}

static int64_t whole(const char *text, const char *what) {
    char *end;
    errno = 0;
    long long found = strtoll(text, &end, 10);
    if (end == text || *end || errno) refuse(what, text);
    return found;
}

static uint64_t seed_of(const char *text) {
    char *end;
    errno = 0;
    unsigned long long found = strtoull(text, &end, 10); /* of -1 that is 2^64 - 1, as wanted */
    if (end == text || *end || errno) refuse("--seed is a whole number of 64 bits", text);
    return found;
}

/* Token ids that commas separate; the caller frees them. */
static int64_t *ids_of(const char *text, int64_t *num_tokens) {
    int64_t *tokens = malloc((strlen(text) + 1) * sizeof *tokens);
    char *copy = strdup(text), *rest = copy;
    *num_tokens = 0;
    for (char *one; (one = strsep(&rest, ",")) != NULL;)
        tokens[(*num_tokens)++] = whole(one, "--ids are token ids with commas between them");
    free(copy);
    return tokens;
}

static void close_host(SpecedgeHost *host) {
    if (host) specedge_close(host);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* A host that is open; else NULL, after saying why. */
static SpecedgeHost *open_host(const char *bundle, int64_t k) {
    const char *library = variable("SPECEDGE_ONNXRUNTIME");
    SpecedgeHost *host = specedge_open(bundle, k, library ? library : "libonnxruntime.so",
                                       variable("SPECEDGE_EXTENSIONS"));
    if (!*specedge_error(host)) return host;
    fprintf(stderr, "error: %s\n", specedge_error(host));
    specedge_close(host);
    return NULL;
}

/* ---- Writing as it comes ---- */

static bool write_text(void *user, const int64_t *tokens, int64_t num_tokens, int64_t num_accepted,
                       const char *text, size_t text_size) {
    (void)user, (void)tokens, (void)num_tokens, (void)num_accepted;
    fwrite(text, 1, text_size, stdout);
    fflush(stdout);
    return !is_interrupted;
}

static bool write_ids(void *is_first, const int64_t *tokens, int64_t num_tokens,
                      int64_t num_accepted, const char *text, size_t text_size) {
    (void)num_accepted, (void)text, (void)text_size;
    for (int64_t i = 0; i < num_tokens; i++, *(bool *)is_first = false)
        printf("%s%lld", *(bool *)is_first ? "" : ",", (long long)tokens[i]);
    fflush(stdout);
    return !is_interrupted;
}

static bool generate(SpecedgeHost *host, const char *prompt, const char *ids,
                     const SpecedgeSettings *settings) {
    int64_t *tokens = NULL, num_tokens = 0;
    bool is_first = true;
    if (ids) tokens = ids_of(ids, &num_tokens);
    bool done = ids || specedge_encode(host, prompt, &tokens, &num_tokens);
    done = done && specedge_generate(host, tokens, num_tokens, settings,
                                     ids ? write_ids : write_text, &is_first);
    if (done) printf("\n");
    free(tokens);
    return done;
}

/* ---- golden.json ---- */

typedef struct {
    json_t *prompt_tokens, *tokens, *num_accepted;
    char *text;
    size_t text_size;
} Written;

static void append(json_t *array, const int64_t *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) json_array_append_new(array, json_integer(values[i]));
}

static bool collect(void *user, const int64_t *tokens, int64_t num_tokens, int64_t num_accepted,
                    const char *text, size_t text_size) {
    Written *written = user;
    append(written->tokens, tokens, num_tokens);
    append(written->num_accepted, &num_accepted, num_tokens > 0);
    written->text = realloc(written->text, written->text_size + text_size + 1);
    memcpy(written->text + written->text_size, text, text_size);
    written->text_size += text_size;
    return !is_interrupted;
}

#define NUMBER(key) json_number_value(json_object_get(transcript, key))

/* Write what a transcript asks for. */
static bool rewrite(SpecedgeHost *host, const json_t *transcript, Written *written,
                    bool *has_text) {
    SpecedgeSettings settings = {
        .max_new_tokens = (int64_t)NUMBER("max_new_tokens"), .temperature = NUMBER("temperature"),
        .top_k = (int64_t)NUMBER("top_k"), .top_p = NUMBER("top_p"), .min_p = NUMBER("min_p"),
        .repetition_penalty = NUMBER("repetition_penalty"), .seed = (uint64_t)NUMBER("seed"),
    };
    const json_t *ids = json_object_get(transcript, "prompt_tokens"), *id;
    int64_t *tokens = NULL, num_tokens = 0;
    size_t i;
    *has_text = specedge_encode(host, json_string_value(json_object_get(transcript, "prompt")),
                                &tokens, &num_tokens);
    if (!*has_text) {
        tokens = malloc((json_array_size(ids) + 1) * sizeof *tokens);
        json_array_foreach(ids, i, id) tokens[num_tokens++] = json_integer_value(id);
    }
    append(written->prompt_tokens, tokens, num_tokens);
    bool done = specedge_generate(host, tokens, num_tokens, &settings, collect, written);
    free(tokens);
    return done;
}

/* What of a transcript is not as written, or NULL. */
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
    Written written = {json_array(), json_array(), json_array(), calloc(1, 1), 0};
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

/* Replay all transcripts, with a host for each K. */
static bool golden(const char *bundle) {
    char path[4096];
    json_error_t error;
    snprintf(path, sizeof path, "%s/golden.json", bundle);
    json_t *file = json_load_file(path, 0, &error), *transcript;
    if (!file) refuse("a bundle with golden.json is wanted: run specedge embed", bundle);
    SpecedgeHost *host = NULL;
    int64_t k = 0;
    size_t i;
    bool is_right = true;
    json_array_foreach(json_object_get(file, "transcripts"), i, transcript) {
        int64_t wanted = (int64_t)NUMBER("num_draft_tokens");
        if (k != wanted) close_host(host), host = open_host(bundle, k = wanted);
        is_right &= host && replay(host, transcript);
    }
    close_host(host);
    json_decref(file);
    return is_right && i;
}

int main(int argc, char **argv) {
    static const struct option OPTIONS[] = {
        {"max-new-tokens", 1, NULL, 'n'}, {"num-draft-tokens", 1, NULL, 'k'},
        {"temperature", 1, NULL, 't'}, {"top-k", 1, NULL, 'K'}, {"top-p", 1, NULL, 'P'},
        {"min-p", 1, NULL, 'M'}, {"repetition-penalty", 1, NULL, 'R'}, {"seed", 1, NULL, 's'},
        {"ids", 1, NULL, 'i'}, {"golden", 0, NULL, 'g'}, {NULL, 0, NULL, 0}};
    SpecedgeSettings settings = {.max_new_tokens = 64, .top_p = 1, .repetition_penalty = 1};
    const char *ids = NULL;
    bool is_golden = false;
    int64_t k = 0;
    for (int option; (option = getopt_long(argc, argv, "n:k:", OPTIONS, NULL)) != -1;) {
        switch (option) {
        case 'n': settings.max_new_tokens = whole(optarg, "--max-new-tokens is a number"); break;
        case 'k': k = whole(optarg, "--num-draft-tokens is a number"); break;
        case 't': settings.temperature = number(optarg, "--temperature is a number"); break;
        case 'K': settings.top_k = whole(optarg, "--top-k is a number"); break;
        case 'P': settings.top_p = number(optarg, "--top-p is a number"); break;
        case 'M': settings.min_p = number(optarg, "--min-p is a number"); break;
        case 'R': settings.repetition_penalty = number(optarg, "the penalty is a number"); break;
        case 's': settings.seed = seed_of(optarg); break;
        case 'i': ids = optarg; break;
        case 'g': is_golden = true; break;
        default: return fputs(USAGE, stderr), 1;
        }
    }
    if (argc - optind != (ids || is_golden ? 1 : 2)) return fputs(USAGE, stderr), 1;
    signal(SIGINT, interrupt);
    if (is_golden) return !golden(argv[optind]);
    SpecedgeHost *host = open_host(argv[optind], k);
    bool done = host && generate(host, argv[optind + 1], ids, &settings);
    if (host && !done) fprintf(stderr, "error: %s\n", specedge_error(host));
    close_host(host);
    return is_interrupted ? 130 : !done;
}
