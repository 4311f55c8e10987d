/* Text from a specedge bundle: speculative decoding with ONNX Runtime and no sampling code. */
#ifndef SPECEDGE_HOST_H
#define SPECEDGE_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct SpecedgeHost SpecedgeHost;

typedef struct {
    int64_t max_new_tokens;
    double temperature; /* 0 is greedy */
    int64_t top_k;      /* 0 is off */
    double top_p, min_p, repetition_penalty; /* 1, 0 and 1 are off */
    uint64_t seed;
} SpecedgeSettings;

/* Called after each round with its tokens, how many of them were drafted, and the text that became
 * certain, in whole characters of UTF-8. Called without tokens, too: after each piece of a long
 * prompt, and with what is left of the text at the end. Generating stops after `false`. */
typedef bool SpecedgeOnRound(void *user, const int64_t *tokens, int64_t num_tokens,
                             int64_t num_accepted, const char *text, size_t text_size);

/* Open a bundle to draft K tokens a round, or as many as it says where K is 0. Libraries are given
 * by path; where `extensions` is NULL there are token ids and no text. The host is never NULL:
 * where opening failed, specedge_error is not empty. */
SpecedgeHost *specedge_open(const char *bundle, int64_t k, const char *onnxruntime,
                            const char *extensions);
void specedge_close(SpecedgeHost *host);

/* Why the last call failed, in one line. */
const char *specedge_error(const SpecedgeHost *host);

/* The tokens of a text; the caller frees them. */
bool specedge_encode(SpecedgeHost *host, const char *text, int64_t **tokens, int64_t *num_tokens);

/* Continue a prompt. What it shares with the text before it is not computed again. */
bool specedge_generate(SpecedgeHost *host, const int64_t *prompt, int64_t num_tokens,
                       const SpecedgeSettings *settings, SpecedgeOnRound *on_round, void *user);

#endif
