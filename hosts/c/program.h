/* What the two files of the program share. */
#include <signal.h>

#include "specedge_host.h"

extern volatile sig_atomic_t is_interrupted; /* Ctrl-C was pressed */

/* A host that is open; else NULL, after saying why. */
SpecedgeHost *open_host(const char *bundle, int64_t k);

/* Write all texts of golden.json again; whether they are the same. */
bool replay_golden(const char *bundle);
