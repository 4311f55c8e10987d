#include "utf8.h"

#include <string.h>

static size_t replace(Utf8 *utf8, char *text) {
    utf8->num_held = utf8->num_missing = 0;
    memcpy(text, "\xEF\xBF\xBD", 3);
    return 3;
}

/* Begin a character; return the size of the replacement if its first byte is invalid. */
static size_t begin(Utf8 *utf8, unsigned char byte, char *text) {
    if ((byte >= 0x80 && byte < 0xC2) || byte > 0xF4) return replace(utf8, text);
    utf8->num_missing = byte < 0x80 ? 0 : byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    utf8->low = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
    utf8->high = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
    utf8->held[utf8->num_held++] = (char)byte;
    return 0;
}

size_t utf8_add(Utf8 *utf8, const char *bytes, size_t size, char *text) {
    char *end = text;
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        if (utf8->num_missing && (byte < utf8->low || byte > utf8->high))
            end += replace(utf8, end);
        if (utf8->num_missing) {
            utf8->held[utf8->num_held++] = bytes[i];
            utf8->num_missing--;
            utf8->low = 0x80;
            utf8->high = 0xBF;
        } else {
            end += begin(utf8, byte, end);
        }
        if (utf8->num_missing) continue;
        memcpy(end, utf8->held, utf8->num_held);
        end += utf8->num_held;
        utf8->num_held = 0;
    }
    return end - text;
}

size_t utf8_end(Utf8 *utf8, char *text) { return utf8->num_held ? replace(utf8, text) : 0; }
