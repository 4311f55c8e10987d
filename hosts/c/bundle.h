/* The parts of a bundle's manifest that a host needs: docs/bundle.md. */
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct {
    json_t *manifest; /* owns all of the following */
    json_t *files, *graphs, *end_tokens, *session_options;
    json_t *pass_boundaries; /* cache lengths that no run may cross, or NULL */
    const char *oldest_onnxruntime, *ids_only;
    json_int_t vocab_size, context_length;
    json_t *encoder; /* of an encoder-decoder, or NULL; the following belong to it */
    json_t *decoder_start, *decoder_prefix; /* tokens that begin each text */
    json_int_t max_source_length;
} Bundle;

/* Read the manifest of a bundle and verify all files that it lists; on failure `error` has the reason.
 * The caller frees bundle->manifest in either case. */
bool read_bundle(Bundle *bundle, const char *folder, char *error, size_t error_size);

/* Return true if a graph has an input with a role. */
bool has_input(const json_t *graph, const char *role);

/* Return the first cache length after `length` that no run may cross, or INT64_MAX. */
json_int_t next_boundary(const Bundle *bundle, json_int_t length);

/* Return the first graph with a name, and with K draft tokens unless K is 0; NULL if there is none. */
json_t *find_graph(const Bundle *bundle, const char *name, json_int_t k);
