/* A host's sessions, and the memory that is bound to them. K draft tokens a round, V tokens of the
 * vocabulary. A function that returns false has left a line in host->error. */
#include <jansson.h>

#include "onnxruntime_c_api.h"
#include "specedge_host.h"

enum { MOST_DRAFTED = 64, MAX_PATH = 4096 };

typedef struct {
    OrtSession *session;
    OrtIoBinding *binding;
    OrtValue **bound;
    size_t num_bound;
    const char *tokens; /* the input whose shape changes from run to run */
} Graph;

struct SpecedgeHost {
    char error[512];
    const char *folder;
    json_t *manifest, *hosts;
    const OrtApi *ort;
    OrtEnv *env;
    OrtSessionOptions *options;
    OrtMemoryInfo *memory;
    OrtAllocator *allocator;
    Graph round, draft, target, accept; /* fused: the first; split: the others */
    OrtSession *encode, *decode;        /* NULL where there is no text */
    OrtValue *given, *found;            /* what these took and gave last */
    int64_t k, vocab_size, context_length, draft_context_length;

    int64_t *text, length; /* behind it there is room for K drafted tokens */
    int64_t draft_start;   /* where in the text the draft's cache begins */
    char held[4];          /* the beginning of a character that is not complete */

    /* What the graphs read and write, by role. */
    int64_t draft_length, target_length, logits_from, num_draft_tokens, num_accepted, top_k;
    int64_t token, drafted[MOST_DRAFTED], next_tokens[MOST_DRAFTED + 1];
    float temperature, min_p, repetition_penalty, *row, *weights, *logits;
    double top_p, uniform, uniforms[2 * MOST_DRAFTED + 1];
    bool *seen;
};

bool fail(SpecedgeHost *host, const char *format, ...);
bool ok(SpecedgeHost *host, OrtStatus *status);
#define TRY(host, call)                                       \
    do {                                                      \
        if (!ok((host), (host)->ort->call)) return false;     \
    } while (0)

/* What a key of an object holds: "" or 0 where it does not hold that. */
const char *text_of(const json_t *object, const char *key);
int64_t number_of(const json_t *object, const char *key);

bool read_manifest(SpecedgeHost *host);
/* Run a graph, which takes text[from:end] if it takes any. */
bool run_graph(SpecedgeHost *host, Graph *graph, int64_t from, int64_t end);
bool open_graphs(SpecedgeHost *host, const char *onnxruntime, const char *extensions);
void close_graphs(SpecedgeHost *host);
