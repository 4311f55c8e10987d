/* A bundle's manifest, and the files that it lists: docs/bundle.md. */
#include "internal.h"

#include <ctype.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { FORMAT = 8, HASHED = 8 << 20 /* bytes; a larger file is known by its size alone */ };

const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

int64_t number_of(const json_t *object, const char *key) {
    return json_integer_value(json_object_get(object, key));
}

static void hash(const char *path, char hex[65]) {
    unsigned char block[1 << 14], digest[32] = {0};
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    FILE *file = fopen(path, "rb");
    EVP_DigestInit_ex(context, EVP_sha256(), NULL);
    for (size_t size; file && (size = fread(block, 1, sizeof block, file)) > 0;)
        EVP_DigestUpdate(context, block, size);
    EVP_DigestFinal_ex(context, digest, NULL);
    EVP_MD_CTX_free(context);
    if (file) fclose(file);
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

static bool check_file(SpecedgeHost *host, const char *name, const json_t *file) {
    char path[MAX_PATH], hex[65];
    struct stat found;
    long long size = number_of(file, "size");
    snprintf(path, sizeof path, "%s/%s", host->folder, name);
    if (!isalnum((unsigned char)*name) || strstr(name, ".."))
        return fail(host, "bundle.json lists %s, which is outside of the bundle", name);
    if (stat(path, &found) || !S_ISREG(found.st_mode))
        return fail(host, "%s is missing; copy the whole bundle", path);
    if (found.st_size != size)
        return fail(host, "%s has %lld bytes, bundle.json says %lld; copy the bundle again", path,
                    (long long)found.st_size, size);
    if (size > HASHED) return true;
    hash(path, hex);
    return !strcmp(hex, text_of(file, "sha256")) ||
           fail(host, "%s has another SHA-256 than bundle.json says; copy the bundle again", path);
}

bool read_manifest(SpecedgeHost *host) {
    char path[MAX_PATH];
    json_error_t error;
    snprintf(path, sizeof path, "%s/bundle.json", host->folder);
    host->manifest = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!host->manifest) return fail(host, "%s is no bundle: %s", host->folder, error.text);
    int format = (int)number_of(host->manifest, "format");
    if (format != FORMAT)
        return fail(host, "%s has format %d, this host reads %d; export the pair again", path,
                    format, FORMAT);
    host->hosts = json_object_get(host->manifest, "hosts");
    if (!json_object_get(host->hosts, "graphs"))
        return fail(host, "%s has no graphs for hosts; run specedge embed --bundle %s", path,
                    host->folder);
    const char *name;
    json_t *file;
    json_object_foreach(json_object_get(host->manifest, "files"), name, file)
        if (!check_file(host, name, file)) return false;
    return true;
}
