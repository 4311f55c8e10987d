/* libssl.so.99: lets .NET Core 3.1, which looks for OpenSSL 1.1, run where there is OpenSSL 3 alone.
 *
 * OpenSSL 3 made macros of three functions that .NET looks up by name; these are they. It finds all
 * others in libssl.so.3 and libcrypto.so.3, which this library is linked with. .NET 6 and later need
 * none of this. Build: cc -shared -fPIC -o libssl.so.99 openssl_shim.c -Wl,--no-as-needed
 * -l:libssl.so.3 -l:libcrypto.so.3; use: CLR_OPENSSL_VERSION_OVERRIDE=99 and LD_LIBRARY_PATH.
 */
typedef void Opaque;

extern int EVP_MD_get_size(const Opaque *digest);
extern Opaque *SSL_get1_peer_certificate(const Opaque *connection);
extern void ERR_new(void);
extern void ERR_set_error(int library, int reason, const char *format, ...);

int EVP_MD_size(const Opaque *digest) { return EVP_MD_get_size(digest); }

Opaque *SSL_get_peer_certificate(const Opaque *connection) {
    return SSL_get1_peer_certificate(connection);
}

void ERR_put_error(int library, int function, int reason, const char *file, int line) {
    (void)function, (void)file, (void)line;
    ERR_new();
    ERR_set_error(library, reason, 0);
}
