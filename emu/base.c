#include "base.h"

#include <stdarg.h>
#include <stdio.h>

bool emu_fail(struct emu_error *e, enum emu_code code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    e->code = code;
    vsnprintf(e->text, sizeof e->text, fmt, args);
    va_end(args);
    return false;
}

void emu_junk(void *to, size_t bytes, uint64_t seed) {
    uint64_t *p = to;
    for (size_t n = 0; n < bytes / 8; n++)
        p[n] = emu_mix(seed + n * emu_golden); /* none waits for another: vector code */
}
