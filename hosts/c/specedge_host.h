/* Text from a specedge bundle: speculative decoding with ONNX Runtime and no sampling code. */
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

/* What a round wrote: tokens, how many of them were drafted, and their text. That is UTF-8, and may
 * begin and end in the middle of a character: utf8.h makes whole ones of it. */
typedef struct {
    const int64_t *tokens;
    int64_t num_tokens, num_accepted;
    const char *bytes;
    size_t num_bytes;
} SpecedgeRound;

/* Called after each round, and without tokens after each piece of a long prompt; false ends it. */
typedef bool SpecedgeOnRound(void *user, const SpecedgeRound *round);

/* Open a bundle to draft K tokens a round, or as many as it says where K is 0. `onnxruntime` is
 * what OrtGetApiBase() gives, `extensions` the path of libortextensions.so; with NULL there are
 * token ids and no text. Never NULL: where it failed, specedge_error is not empty. */
SpecedgeHost *specedge_open(const char *bundle, int64_t k, const OrtApiBase *onnxruntime,
                            const char *extensions);
void specedge_close(SpecedgeHost *host);

/* Why the last call failed, in one line. */
const char *specedge_error(const SpecedgeHost *host);

/* The tokens of a text in UTF-8, which are the host's until its next call. */
bool specedge_encode(SpecedgeHost *host, const char *text, const int64_t **tokens,
                     int64_t *num_tokens);

/* Continue a prompt. What it shares with the text before it is not computed again. */
bool specedge_generate(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                       const SpecedgeSettings *settings, SpecedgeOnRound *on_round, void *user);

#endif
