// The table of backends in this build, and the one way to report a failure.
#include <stdarg.h>
#include <stdio.h>

#include "mxfp8.h"

int mx_fail(struct mx_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return 1;
}

const struct mx_backend *const *mx_backends(int *count) {
#define MX_CPU_BACKEND_ENTRY(level) &mx_cpu_##level,
    static const struct mx_backend *const backends[] = {&mx_gfx950, &mx_sm90, &mx_gfx950_emulator,
                                                        MX_CPU_LEVELS(MX_CPU_BACKEND_ENTRY)};
#undef MX_CPU_BACKEND_ENTRY
    *count = sizeof backends / sizeof backends[0];
    return backends;
}
