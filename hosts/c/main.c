/* Command line of the host: README.md. */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"
#include "utf8.h"

static const char USAGE[] =
    "usage: specedge_host BUNDLE PROMPT [OPTIONS]        write text\n"
    "       specedge_host BUNDLE --ids 5,17,3 [OPTIONS]  take token ids and write token ids\n"
    "       specedge_host BUNDLE --golden                replay the bundle's golden.json\n"
    "options: -n/--max-new-tokens N, -k/--num-draft-tokens K, --temperature T, --top-k N,\n"
    "         --top-p P, --min-p P, --repetition-penalty R, --seed S\n";

volatile sig_atomic_t is_interrupted;

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
    unsigned long long found = strtoull(text, &end, 10); /* -1 wraps to 2^64 - 1, as specified */
    if (end == text || *end || errno) refuse("--seed is an integer of 64 bits", text);
    return found;
}

/* Parse comma-separated token ids; the caller frees them. */
static int64_t *ids_of(const char *text, int64_t *num_tokens) {
    int64_t *tokens = malloc((strlen(text) + 1) * sizeof *tokens);
    char *copy = strdup(text), *rest = copy;
    *num_tokens = 0;
    for (char *one; (one = strsep(&rest, ",")) != NULL;)
        tokens[(*num_tokens)++] = whole(one, "--ids are token ids with commas between them");
    free(copy);
    return tokens;
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Loaded instead of linked, so that the program works with any version of the library. */
static const OrtApiBase *load_onnxruntime(void) {
    const char *path = variable("SPECEDGE_ONNXRUNTIME");
    const OrtApiBase *(*base)(void) = NULL;
    void *library = dlopen(path ? path : "libonnxruntime.so", RTLD_NOW);
    if (library) *(void **)&base = dlsym(library, "OrtGetApiBase");
    if (!base) fprintf(stderr, "error: ONNX Runtime does not load: %s\n", dlerror());
    return base ? base() : NULL;
}

SpecedgeHost *open_host(const char *bundle, int64_t k) {
    const OrtApiBase *onnxruntime = load_onnxruntime();
    if (!onnxruntime) return NULL;
    SpecedgeHost *host = specedge_open(bundle, k, onnxruntime, variable("SPECEDGE_EXTENSIONS"));
    if (!*specedge_error(host)) return host;
    fprintf(stderr, "error: %s\n", specedge_error(host));
    specedge_close(host);
    return NULL;
}

static bool write_text(void *utf8, const SpecedgeRound *round) {
    char *text = malloc(3 * round->num_bytes + 3);
    fwrite(text, 1, utf8_add(utf8, round->bytes, round->num_bytes, text), stdout);
    fflush(stdout);
    free(text);
    return !is_interrupted;
}

static bool write_ids(void *is_first, const SpecedgeRound *round) {
    for (int64_t i = 0; i < round->num_tokens; i++, *(bool *)is_first = false)
        printf("%s%lld", *(bool *)is_first ? "" : ",", (long long)round->tokens[i]);
    fflush(stdout);
    return !is_interrupted;
}

static bool continue_ids(SpecedgeHost *host, const char *ids, const SpecedgeSettings *settings) {
    bool is_first = true;
    int64_t num_tokens, *tokens = ids_of(ids, &num_tokens);
    bool done = specedge_generate(host, tokens, num_tokens, settings, write_ids, &is_first);
    free(tokens);
    if (done) printf("\n");
    return done;
}

static bool continue_text(SpecedgeHost *host, const char *text, const SpecedgeSettings *settings) {
    Utf8 utf8 = {0};
    char rest[3];
    const int64_t *tokens;
    int64_t num_tokens;
    if (!specedge_encode(host, text, &tokens, &num_tokens) ||
        !specedge_generate(host, tokens, num_tokens, settings, write_text, &utf8))
        return false;
    fwrite(rest, 1, utf8_end(&utf8, rest), stdout);
    printf("\n");
    return true;
}

/* The library may fail on invalid UTF-8. */
static void check_text(const char *text) {
    Utf8 utf8 = {0};
    size_t size = strlen(text);
    char *copy = malloc(3 * size + 3);
    size_t written = utf8_add(&utf8, text, size, copy);
    if (utf8.num_held || written != size || memcmp(text, copy, size)) {
        fprintf(stderr, "error: the prompt is not UTF-8\n");
        exit(1);
    }
    free(copy);
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
    if (is_golden) return !replay_golden(argv[optind]);
    const char *prompt = ids ? NULL : argv[optind + 1];
    if (prompt) check_text(prompt);
    SpecedgeHost *host = open_host(argv[optind], k);
    if (!host) return 1;
    bool done = ids ? continue_ids(host, ids, &settings)
                    : continue_text(host, prompt, &settings);
    if (!done) fprintf(stderr, "error: %s\n", specedge_error(host));
    specedge_close(host);
    return is_interrupted ? 130 : !done;
}
