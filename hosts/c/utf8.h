/* Whole characters of bytes that come in pieces. */
#include <stddef.h>

typedef struct { /* zero at first */
    char held[4]; /* the beginning of a character */
    int num_held, num_missing;
    unsigned char low, high; /* what its next byte may be */
} Utf8;

/* Write what the bytes complete to `text`, which has room for 3 * size + 3, and return its size.
 * What is no UTF-8 becomes U+FFFD, one for each maximal subpart of a character (Unicode 3.9). */
size_t utf8_add(Utf8 *utf8, const char *bytes, size_t size, char *text);

/* The same where no bytes come any more. */
size_t utf8_end(Utf8 *utf8, char *text);
