/* Preloaded into a process: it holds the rename of an entry of a Delta table's log.
 *
 * RENAME_GATE names a file: "<gate>.held" is made when a rename has arrived, which goes on once the
 * gate exists.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int rename(const char *from, const char *to) {
    int (*next)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    const char *gate = getenv("RENAME_GATE"), *name = strrchr(to, '/');
    size_t length = strlen(to);
    if (gate && strstr(to, "/_delta_log/") && name[1] != '.' && !strcmp(to + length - 5, ".json")) {
        char held[4096];
        snprintf(held, sizeof held, "%s.held", gate);
        close(open(held, O_CREAT | O_WRONLY, 0600));
        while (access(gate, F_OK)) usleep(10000);
    }
    return next(from, to);
}
