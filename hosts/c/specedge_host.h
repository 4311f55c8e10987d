/* Speculative decoding of a specedge bundle with ONNX Runtime; sampling is part of the graphs. */
#ifndef SPECEDGE_HOST_H
#define SPECEDGE_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onnxruntime_c_api.h"

typedef struct SpecedgeHost SpecedgeHost;

typedef struct {
    int64_t max_new_tokens;
    float temperature; /* 0 is greedy */
    int64_t top_k;     /* 0 is off */
    double top_p;      /* 1 is off */
    float min_p, repetition_penalty; /* 0 and 1 are off */
    uint64_t seed;
} SpecedgeSettings;

/* Output of a round: tokens, the number of accepted draft tokens, and their text in UTF-8, which may
 * begin or end inside a character; utf8.h reassembles characters. */
typedef struct {
    const int64_t *tokens;
    int64_t num_tokens, num_accepted;
    const char *bytes;
    size_t num_bytes;
} SpecedgeRound;

/* Called after each round, and without tokens after each piece of a long prompt; false stops generation. */
typedef bool SpecedgeOnRound(void *user, const SpecedgeRound *round);

/* Open a bundle with K draft tokens per round, or its own K if K is 0. `onnxruntime` is the result of
 * OrtGetApiBase(), `extensions` the path of libortextensions.so, or NULL for token ids only. Never
 * returns NULL: on failure specedge_error is not empty. */
SpecedgeHost *specedge_open(const char *bundle, int64_t k, const OrtApiBase *onnxruntime,
                            const char *extensions);
void specedge_close(SpecedgeHost *host);

/* Return the reason for the last failure, in one line. */
const char *specedge_error(const SpecedgeHost *host);

/* Encode a text in UTF-8; the tokens belong to the host and are valid until its next call. */
bool specedge_encode(SpecedgeHost *host, const char *text, const int64_t **tokens,
                     int64_t *num_tokens);

/* Continue a prompt, reusing the caches for its common prefix with the previous text. The prompt of an
 * encoder-decoder is its source; the text begins with the bundle's decoder tokens. */
bool specedge_generate(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                       const SpecedgeSettings *settings, SpecedgeOnRound *on_round, void *user);

#endif
