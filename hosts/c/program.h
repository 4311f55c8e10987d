/* Declarations shared by main.c and golden.c. */
#include <signal.h>

#include "specedge_host.h"

extern volatile sig_atomic_t is_interrupted; /* Ctrl-C was pressed */

/* Open a host; print the reason and return NULL on failure. */
SpecedgeHost *open_host(const char *bundle, int64_t k);

/* Replay golden.json; return true if all texts match. */
bool replay_golden(const char *bundle);
