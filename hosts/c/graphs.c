/* Sessions, and memory that is bound to them once. */
#include "internal.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

enum { API = 17 /* of ONNX Runtime 1.17 and of all later ones */, MAX_RANK = 4 };
#define INT ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
#define BOOL ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL
#define FLOAT ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
#define DOUBLE ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE

typedef struct { /* memory for what has this role and so many elements */
    const char *role;
    void *memory;
    ONNXTensorElementDataType type;
    int64_t count;
} Slot;

bool fail(SpecedgeHost *host, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(host->error, sizeof host->error, format, values);
    va_end(values);
    host->length = 0; /* the caches may hold anything */
    return false;
}

bool ok(SpecedgeHost *host, OrtStatus *status) {
    if (!status) return true;
    fail(host, "%s", host->ort->GetErrorMessage(status));
    host->error[strcspn(host->error, "\n")] = 0;
    host->ort->ReleaseStatus(status);
    return false;
}

/* Whether this processor adds up products of bytes in 16 bits: AVX2 without VNNI. */
static bool saturates(void) {
#ifdef __x86_64__
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5) || c & 1u << 11) return false;
    return !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 4);
#else
    return false;
#endif
}

static bool has_integers(SpecedgeHost *host, const char *model) {
    return !strncmp(text_of(json_object_get(host->manifest, model), "weights_dtype"), "int", 3);
}

static int release_of(const char *version) { /* 1032 of 1.32.0 */
    int major = 0, minor = 0;
    sscanf(version, "%d.%d", &major, &minor);
    return 1000 * major + minor;
}

/* The library is loaded, not linked: a linked program takes that one version alone. */
static bool open_runtime(SpecedgeHost *host, const char *path, const char *extensions) {
    const OrtApiBase *(*base)(void) = NULL;
    void *library = dlopen(path, RTLD_NOW);
    if (library) *(void **)&base = dlsym(library, "OrtGetApiBase");
    if (!base) return fail(host, "ONNX Runtime does not load: %s", dlerror());
    const char *version = base()->GetVersionString();
    const char *oldest = text_of(host->hosts, "oldest_onnxruntime");
    host->ort = base()->GetApi(API);
    if (!host->ort || release_of(version) < release_of(oldest))
        return fail(host, "%s is ONNX Runtime %s, the bundle needs %s", path, version, oldest);
    TRY(host, CreateEnv(ORT_LOGGING_LEVEL_ERROR, "specedge", &host->env));
    TRY(host, CreateSessionOptions(&host->options));
    TRY(host, CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &host->memory));
    TRY(host, GetAllocatorWithDefaultOptions(&host->allocator));
    json_t *options = json_object_get(host->hosts, "session_options"), *value;
    const char *key;
    json_object_foreach(options, key, value)
        TRY(host, AddSessionConfigEntry(host->options, key, text_of(options, key)));
    if ((has_integers(host, "draft") || has_integers(host, "target")) && saturates()) {
        if (release_of(version) < 1030)
            return fail(host, "ONNX Runtime %s multiplies bytes wrongly on this processor (AVX2 "
                        "without VNNI); take 1.30 or later", version);
        TRY(host, AddSessionConfigEntry(host->options, "session.x64quantprecision", "1"));
    }
    if (extensions) TRY(host, RegisterCustomOpsLibrary_V2(host->options, extensions));
    return true;
}

static bool open_session(SpecedgeHost *host, const json_t *graph, OrtSession **session) {
    char path[MAX_PATH];
    const char *file = text_of(graph, "file");
    if (!json_object_get(json_object_get(host->manifest, "files"), file))
        return fail(host, "bundle.json does not list the file \"%s\" of a graph", file);
    snprintf(path, sizeof path, "%s/%s", host->folder, file);
    TRY(host, CreateSession(host->env, path, host->options, session));
    return true;
}

/* Bind memory of zeros to both ends of a cache: a run then writes its new rows alone. */
static bool bind_cache(SpecedgeHost *host, Graph *graph, const json_t *input,
                       const json_t *outputs, const int64_t *shape, double count) {
    OrtValue **cache = &graph->bound[graph->num_bound++];
    int64_t longest = graph == &host->draft ? host->draft_context_length : host->context_length;
    void *data;
    if (shape[2] <= longest + host->k)
        return fail(host, "the caches have no room for %d draft tokens", (int)host->k);
    TRY(host, CreateTensorAsOrtValue(host->allocator, shape, 4, FLOAT, cache));
    TRY(host, GetTensorMutableData(*cache, &data));
    memset(data, 0, (size_t)count * sizeof(float));
    TRY(host, BindInput(graph->binding, text_of(input, "name"), *cache));
    size_t i;
    json_t *output;
    json_array_foreach(outputs, i, output)
        if (!strcmp(text_of(output, "buffer"), text_of(input, "buffer")))
            TRY(host, BindOutput(graph->binding, text_of(output, "name"), *cache));
    return true;
}

/* Bind an input, or an output where `outputs` is NULL, to the memory of its role and size. */
static bool bind_tensor(SpecedgeHost *h, Graph *graph, const json_t *tensor,
                        const json_t *outputs) {
    const int64_t k = h->k, v = h->vocab_size;
    const int64_t columns = number_of(json_object_get(h->manifest, "target"), "padded_vocab_size");
    const Slot slots[] = { /* which of several of a role is meant, the size says */
        {"draft_length", &h->draft_length, INT, 1}, {"target_length", &h->target_length, INT, 1},
        {"past_length", &h->target_length, INT, 1}, {"logits_from", &h->logits_from, INT, 1},
        {"num_draft_tokens", &h->num_draft_tokens, INT, 1}, {"top_k", &h->top_k, INT, 1},
        {"temperature", &h->temperature, FLOAT, 1}, {"min_p", &h->min_p, FLOAT, 1},
        {"repetition_penalty", &h->repetition_penalty, FLOAT, 1}, {"top_p", &h->top_p, DOUBLE, 1},
        {"seen", h->seen, BOOL, v}, {"uniforms", h->uniforms, DOUBLE, 2 * k + 1},
        {"uniforms", &h->uniform, DOUBLE, 1}, {"uniforms", h->uniforms + k, DOUBLE, k + 1},
        {"token", &h->token, INT, 1}, {"tokens", h->drafted, INT, k}, {"weights", h->row, FLOAT, v},
        {"weights", h->weights, FLOAT, k * v}, {"logits", h->logits, FLOAT, (k + 1) * columns},
        {"next_tokens", h->next_tokens, INT, k + 1}, {"num_accepted", &h->num_accepted, INT, 1},
    };
    const char *name = text_of(tensor, "name"), *role = text_of(tensor, "role");
    int64_t shape[MAX_RANK] = {0};
    double count = 1;
    size_t rank;
    json_t *size;
    json_array_foreach(json_object_get(tensor, "shape"), rank, size) {
        const char *letter = json_is_string(size) ? json_string_value(size) : "";
        if (rank == MAX_RANK) return fail(h, "%s has more than %d axes", name, MAX_RANK);
        shape[rank] = json_integer_value(size); /* 0 of a letter */
        if (*letter == 'B') shape[rank] = 1;
        if (*letter == 'K') shape[rank] = k;
        if (*letter == 'R') shape[rank] = k + 1;
        count *= (double)shape[rank]; /* 0 of N and T, which change from run to run */
    }
    if (outputs && !strcmp(role, "cache"))
        return bind_cache(h, graph, tensor, outputs, shape, count);
    if (outputs && !strcmp(role, "tokens") && count == 0) {
        graph->tokens = name;
        return true;
    }
    for (const Slot *slot = slots; slot < slots + sizeof slots / sizeof *slots; slot++) {
        if (strcmp(slot->role, role) || (double)slot->count != count) continue;
        OrtValue **value = &graph->bound[graph->num_bound++];
        size_t size = slot->type == BOOL ? 1 : slot->type == FLOAT ? 4 : 8;
        TRY(h, CreateTensorWithDataAsOrtValue(h->memory, slot->memory, slot->count * size, shape,
                                              rank, slot->type, value));
        if (outputs) return ok(h, h->ort->BindInput(graph->binding, name, *value));
        return ok(h, h->ort->BindOutput(graph->binding, name, *value));
    }
    return fail(h, "this host has nothing for %s, of role %s and %.0f numbers", name, role, count);
}

static bool open_graph(SpecedgeHost *host, Graph *graph, const json_t *entry,
                       const json_t *signature) {
    const json_t *inputs = json_object_get(signature, "inputs");
    const json_t *outputs = json_object_get(signature, "outputs");
    graph->bound = calloc(json_array_size(inputs) + json_array_size(outputs), sizeof *graph->bound);
    if (!open_session(host, entry, &graph->session)) return false;
    TRY(host, CreateIoBinding(graph->session, &graph->binding));
    size_t i;
    json_t *tensor;
    json_array_foreach(inputs, i, tensor)
        if (!bind_tensor(host, graph, tensor, outputs)) return false;
    json_array_foreach(outputs, i, tensor)
        if (strcmp(text_of(tensor, "role"), "cache") && !bind_tensor(host, graph, tensor, NULL))
            return false;
    return true;
}

/* The first graph of a name, and of K or of an op set where these are given. */
static const json_t *entry_of(const json_t *graphs, const char *name, int64_t k, const char *ops) {
    size_t i;
    json_t *graph;
    json_array_foreach(graphs, i, graph)
        if (!strcmp(text_of(graph, "name"), name) &&
            (!ops || !strcmp(text_of(graph, "ops"), ops)) &&
            (!k || number_of(graph, "num_draft_tokens") == k))
            return graph;
    return NULL;
}

static bool open_split(SpecedgeHost *host, const json_t *graphs) {
    const json_t *target = json_object_get(host->manifest, "target");
    const json_t *draft = entry_of(graphs, "draft", 0, NULL);
    const json_t *accept = entry_of(graphs, "accept", 0, NULL);
    const json_t *decoder = entry_of(json_object_get(target, "graphs"), "decoder", 0,
                                     text_of(host->hosts, "ops"));
    const json_t *signatures = json_object_get(target, "signatures");
    host->row = calloc(host->vocab_size, sizeof(float));
    host->weights = calloc(host->k * host->vocab_size, sizeof(float));
    host->logits = calloc((host->k + 1) * number_of(target, "padded_vocab_size"), sizeof(float));
    return open_graph(host, &host->draft, draft, json_object_get(draft, "signature")) &&
           open_graph(host, &host->accept, accept, json_object_get(accept, "signature")) &&
           open_graph(host, &host->target, decoder,
                      json_object_get(signatures, text_of(decoder, "signature")));
}

static bool open_rounds(SpecedgeHost *host, const json_t *graphs, const json_t *round) {
    if (!round) return open_split(host, graphs);
    return open_graph(host, &host->round, round, json_object_get(round, "signature"));
}

bool open_graphs(SpecedgeHost *host, const char *onnxruntime, const char *extensions) {
    const json_t *graphs = json_object_get(host->hosts, "graphs");
    const json_t *target = json_object_get(host->manifest, "target");
    const json_t *draft = json_object_get(host->manifest, "draft");
    const json_t *round = entry_of(graphs, "round", host->k, NULL);
    const json_t *encode = entry_of(graphs, "encode", 0, NULL);
    const json_t *decode = entry_of(graphs, "decode", 0, NULL);
    if (!host->k) host->k = number_of(round ? round : host->manifest, "num_draft_tokens");
    if (host->k < 1 || host->k > MOST_DRAFTED || !(round || entry_of(graphs, "draft", 0, NULL)))
        return fail(host, "there are no rounds of %lld draft tokens; run specedge embed -k %lld",
                    (long long)host->k, (long long)host->k);
    host->vocab_size = number_of(target, "vocab_size");
    host->context_length = number_of(target, "context_length");
    host->draft_context_length = number_of(draft, "context_length");
    if (host->draft_context_length > host->context_length)
        host->draft_context_length = host->context_length;
    host->text = calloc(host->context_length + host->k, sizeof *host->text);
    host->seen = calloc(host->vocab_size, sizeof *host->seen);
    if (!encode || !decode) extensions = NULL;
    return open_runtime(host, onnxruntime, extensions) && open_rounds(host, graphs, round) &&
           (!extensions || (open_session(host, encode, &host->encode) &&
                            open_session(host, decode, &host->decode)));
}

bool run_graph(SpecedgeHost *host, Graph *graph, int64_t from, int64_t end) {
    OrtValue *fed = NULL;
    if (graph->tokens) {
        int64_t shape[] = {1, end - from};
        TRY(host, CreateTensorWithDataAsOrtValue(host->memory, host->text + from, shape[1] * 8,
                                                 shape, 2, INT, &fed));
        bool is_bound = ok(host, host->ort->BindInput(graph->binding, graph->tokens, fed));
        host->ort->ReleaseValue(fed);
        if (!is_bound) return false;
    }
    TRY(host, RunWithBinding(graph->session, NULL, graph->binding));
    return true;
}

void close_graphs(SpecedgeHost *host) {
    const OrtApi *ort = host->ort;
    Graph *graphs[] = {&host->round, &host->draft, &host->target, &host->accept};
    for (int i = 0; ort && i < 4; i++) {
        for (size_t j = 0; j < graphs[i]->num_bound; j++) ort->ReleaseValue(graphs[i]->bound[j]);
        ort->ReleaseIoBinding(graphs[i]->binding);
        ort->ReleaseSession(graphs[i]->session);
        free(graphs[i]->bound);
    }
    if (ort) {
        ort->ReleaseValue(host->given);
        ort->ReleaseValue(host->found);
        ort->ReleaseSession(host->encode);
        ort->ReleaseSession(host->decode);
        ort->ReleaseMemoryInfo(host->memory);
        ort->ReleaseSessionOptions(host->options);
        ort->ReleaseEnv(host->env);
    }
    void *memory[] = {host->text, host->seen, host->row, host->weights, host->logits};
    for (int i = 0; i < 5; i++) free(memory[i]);
}
