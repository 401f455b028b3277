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

// Each is defined in a folder of kernels/. Best first: of those that run a tensor, the first that is available does.
#if defined(__x86_64__)
#define X86_64_BACKENDS(X) X(mx_cpu_avx512) X(mx_cpu_avx2)
#else
#define X86_64_BACKENDS(X)
#endif
#define BACKENDS(X) X(mx_gfx950) X(mx_sm90) X(mx_gfx950_emulator) X86_64_BACKENDS(X) X(mx_cpu_portable)

#define DECLARE(name) extern const struct mx_backend name;
BACKENDS(DECLARE)

const struct mx_backend *const *mx_backends(int *count) {
#define ENTRY(name) &name,
    static const struct mx_backend *const backends[] = {BACKENDS(ENTRY)};
    *count = sizeof backends / sizeof backends[0];
    return backends;
}
