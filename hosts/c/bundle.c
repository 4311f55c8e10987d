#include "bundle.h"

#include <ctype.h>
#include <openssl/evp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { FORMAT = 10, HASHED = 8 << 20 /* bytes; of larger files only the size is checked */ };
enum { MOST_TOKENS = 1 << 27 /* limit of allocations */ };

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

/* Return the defect of a file of the bundle, or NULL. */
static const char *file_fault(const char *path, const char *name, const json_t *entry) {
    char hex[65];
    struct stat found;
    json_int_t size = json_integer_value(json_object_get(entry, "size"));
    const char *sha256 = json_string_value(json_object_get(entry, "sha256"));
    if (!isalnum((unsigned char)*name) || strstr(name, "..")) return "is outside of the bundle";
    if (stat(path, &found) || !S_ISREG(found.st_mode)) return "is missing";
    if (found.st_size != size) return "has another size than bundle.json says";
    if (size > HASHED) return NULL;
    hash(path, hex);
    return sha256 && !strcmp(hex, sha256) ? NULL : "has another SHA-256 than bundle.json says";
}

static bool read_manifest(Bundle *bundle, const char *path, char *error, size_t error_size) {
    json_error_t found;
    json_t *manifest = bundle->manifest = json_load_file(path, JSON_REJECT_DUPLICATES, &found);
    json_t *hosts = json_object_get(manifest, "hosts");
    json_int_t format = json_integer_value(json_object_get(manifest, "format"));
    json_t *target = json_object_get(json_object_get(manifest, "models"), "target");
    bundle->pass_boundaries = json_object_get(hosts, "pass_boundaries");
    bundle->ids_only = json_string_value(json_object_get(hosts, "ids_only"));
    bundle->encoder = json_object_get(target, "encoder");
    bundle->decoder_start = json_object_get(manifest, "decoder_start");
    bundle->decoder_prefix = json_object_get(manifest, "decoder_prefix");
    bundle->max_source_length = json_integer_value(json_object_get(bundle->encoder, "max_length"));
    if (!manifest)
        snprintf(error, error_size, "%s is not read: %s; give a bundle", path, found.text);
    else if (format != FORMAT)
        snprintf(error, error_size, "%s has format %lld, this host reads %d; run specedge embed",
                 path, (long long)format, FORMAT);
    else if (!json_is_object(hosts))
        snprintf(error, error_size, "%s has no graphs for hosts; run specedge embed", path);
    else if (json_unpack_ex(manifest, &found, 0, "{s:o, s:o, s:{s:{s:I, s:I}}, s:{s:o, s:o, s:s}}",
                            "files", &bundle->files, "end_tokens", &bundle->end_tokens, "models",
                            "target", "vocab_size", &bundle->vocab_size, "context_length",
                            &bundle->context_length, "hosts", "graphs", &bundle->graphs,
                            "session_options", &bundle->session_options, "oldest_onnxruntime",
                            &bundle->oldest_onnxruntime))
        snprintf(error, error_size, "%s: %s; run specedge embed", path, found.text);
    else if (bundle->vocab_size < 1 || bundle->vocab_size > MOST_TOKENS ||
             bundle->context_length < 1 || bundle->context_length > MOST_TOKENS ||
             bundle->max_source_length < 0 || bundle->max_source_length > MOST_TOKENS)
        snprintf(error, error_size,
                 "%s: vocab_size, context_length and max_length are from 1 to %d", path,
                 MOST_TOKENS);
    return !*error;
}

bool read_bundle(Bundle *bundle, const char *folder, char *error, size_t error_size) {
    char path[4096];
    const char *name, *fault;
    json_t *file;
    snprintf(path, sizeof path, "%s/bundle.json", folder);
    if (!read_manifest(bundle, path, error, error_size)) return false;
    json_object_foreach(bundle->files, name, file) {
        snprintf(path, sizeof path, "%s/%s", folder, name);
        if (!(fault = file_fault(path, name, file))) continue;
        snprintf(error, error_size, "%s %s; copy the whole bundle again", path, fault);
        return false;
    }
    return true;
}

bool has_input(const json_t *graph, const char *role) {
    size_t i;
    json_t *input;
    json_array_foreach(json_object_get(json_object_get(graph, "signature"), "inputs"), i, input) {
        const char *role_name = json_string_value(json_object_get(input, "role"));
        if (role_name && !strcmp(role_name, role)) return true;
    }
    return false;
}

json_int_t next_boundary(const Bundle *bundle, json_int_t length) {
    size_t i;
    json_t *boundary;
    json_array_foreach(bundle->pass_boundaries, i, boundary)
        if (json_integer_value(boundary) > length) return json_integer_value(boundary);
    return INT64_MAX;
}

json_t *find_graph(const Bundle *bundle, const char *name, json_int_t k) {
    size_t i;
    json_t *graph;
    json_array_foreach(bundle->graphs, i, graph) {
        const char *found = json_string_value(json_object_get(graph, "name"));
        json_int_t own_k = json_integer_value(json_object_get(graph, "num_draft_tokens"));
        if (found && !strcmp(found, name) && (!k || k == own_k)) return graph;
    }
    return NULL;
}
