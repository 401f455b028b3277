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

// Each is defined in a folder of kernels/.
extern const struct mx_backend mx_gfx950, mx_gfx950_emulator, mx_sm90, mx_cpu_avx512, mx_cpu_avx2, mx_cpu_portable;

// Best first: of those that run a tensor, the first that is available does.
const struct mx_backend *const *mx_backends(int *count) {
    static const struct mx_backend *const backends[] = {
        &mx_gfx950,       &mx_sm90,     &mx_gfx950_emulator,
#if defined(__x86_64__)
        &mx_cpu_avx512,   &mx_cpu_avx2,
#endif
        &mx_cpu_portable,
    };
    *count = sizeof backends / sizeof backends[0];
    return backends;
}
