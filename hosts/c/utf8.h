/* Incremental UTF-8 decoder. */
#include <stddef.h>

typedef struct { /* initialize with zeros */
    char held[4]; /* start of an incomplete character */
    int num_held, num_missing;
    unsigned char low, high; /* range of its next byte */
} Utf8;

/* Write the completed characters to `text`, of at least 3 * size + 3 bytes, and return their size.
 * Invalid UTF-8 becomes U+FFFD, one for each maximal subpart of a character (Unicode 3.9). */
size_t utf8_add(Utf8 *utf8, const char *bytes, size_t size, char *text);

/* Write an incomplete character at the end of the input as U+FFFD. */
size_t utf8_end(Utf8 *utf8, char *text);
