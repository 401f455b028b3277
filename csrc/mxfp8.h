// The interface between the torch ops (shim.c) and a backend. A backend gets arguments that are already checked
// for rank, type, shape and device; group offsets are the one thing only it can look at.
#pragma once
#include <stdint.h>

#include "../kernels/mx_args.h"

// Text of what went wrong, carried up to the op, which raises it. Filled only when a function returns nonzero.
struct mx_error {
    char text[512];
};

// Formats the text and returns nonzero, so that a failing path reads `return mx_fail(error, ...)`.
[[gnu::format(printf, 2, 3)]] int mx_fail(struct mx_error *error, const char *format, ...);

// How and where a call runs.
struct mx_exec {
    void *workspace; // as many bytes as the op's workspace function asked for, 64-byte aligned
    void *stream;    // GPU: the caller's current stream
    int32_t device;  // GPU: device index; -1 with tensors of the host
    int32_t threads; // CPU: number of threads to use
    // CPU: calls body(begin, end, context) on disjoint ranges that cover [0, count), in parallel. Nonzero on failure.
    int (*parallel_for)(int64_t count, void (*body)(int64_t begin, int64_t end, void *context), void *context);
};

// Where a backend's tensors are: the host's go to the best backend there, or to the one that MXFP8_BACKEND names.
enum mx_place { MX_ON_HOST, MX_ON_HOST_IF_NAMED, MX_ON_GPU };

// A kernel of a GPU.
struct mx_gpu_kernel {
    const char *name;
    int32_t image;  // index into the images
    int32_t shared; // bytes of dynamic shared memory
};

// Every function returns 0, or nonzero with the error filled. None allocates, waits for the device or
// (GPU) reads device memory from the host. Workspace functions give bytes, from sizes alone.
struct mx_backend {
    const char *name;
    enum mx_place place;
    int32_t alignment; // bytes that E4M3 operands' addresses must be a multiple of
    int32_t kernel_count;
    const struct mx_gpu_kernel *kernels; // none on the CPU
    int (*available)(int32_t device, struct mx_error *why_not);
    int (*quantize)(const struct mx_quantize_args *, const struct mx_exec *, struct mx_error *);
    int (*gemm_rows)(const struct mx_rows_args *, const struct mx_exec *, struct mx_error *);
    int (*gemm_depth)(const struct mx_depth_args *, const struct mx_exec *, struct mx_error *);
    int (*zero_padding)(const struct mx_padding_args *, const struct mx_exec *, struct mx_error *);
    int64_t (*quantize_workspace)(const struct mx_quantize_args *, const struct mx_exec *);
    int64_t (*gemm_rows_workspace)(const struct mx_rows_args *, const struct mx_exec *);
    int64_t (*gemm_depth_workspace)(const struct mx_depth_args *, const struct mx_exec *);
};

// All backends of this build (backends.c), best first; the count goes to *count. Exported for the inspection module.
[[gnu::visibility("default")]] const struct mx_backend *const *mx_backends(int *count);
