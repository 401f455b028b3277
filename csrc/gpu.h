// What the GPU backends share: drivers found at run time, modules loaded once per device, launches on torch's stream.
// A chip's launch.c, in its folder of kernels/, holds its struct mx_gpu, the launches of each op, and its struct
// mx_backend.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>

#include "mxfp8.h"

#define MX_LENGTH(array) (int32_t)(sizeof(array) / sizeof *(array))

enum { MX_GPU_DEVICES = 64, MX_GPU_KERNELS = 128 };

// The kernels that every GPU has, the first of its kernels; its own follow.
enum mx_gpu_common_kernel {
    MX_GPU_PREPARE_ROWS,
    MX_GPU_PREPARE_DEPTH,
    MX_GPU_QUANTIZE_ROWS, // + enum mx_type, as the next two
    MX_GPU_QUANTIZE_COLS = MX_GPU_QUANTIZE_ROWS + 2,
    MX_GPU_QUANTIZE_BOTH = MX_GPU_QUANTIZE_COLS + 2,
    MX_GPU_ZERO_PADDING = MX_GPU_QUANTIZE_BOTH + 2,
    MX_GPU_OWN_KERNELS,
};

struct mx_gpu_driver; // csrc/gpu.c's table of a driver's functions
extern struct mx_gpu_driver mx_hip, mx_hip_emulator, mx_cuda;

// One architecture on one driver: its description, then what has been loaded.
struct mx_gpu {
    const char *target; // the architecture's name, as the driver gives it for a device
    struct mx_gpu_driver *driver;
    const void *const *images; // code objects (HIP) or PTX (CUDA), built into this library
    const struct mx_gpu_kernel *kernels;
    int32_t image_count, kernel_count;
    struct mx_gpu_device {
        atomic_bool matches, loaded;
        int32_t processors; // multiprocessors, once it matches
        void *functions[MX_GPU_KERNELS];
    } devices[MX_GPU_DEVICES];
};

struct mx_gpu_launch {
    int32_t kernel; // index into the kernels
    uint32_t threads;
    uint32_t grid[3];
};

// Memory that a call's kernels read or write. Only the emulator, which takes the host's, wants to know.
struct mx_gpu_span {
    const void *data;
    int64_t bytes;
    bool written;
};

static inline struct mx_gpu_span mx_gpu_reads(const void *data, int64_t bytes) {
    return (struct mx_gpu_span){data, bytes, false};
}

static inline struct mx_gpu_span mx_gpu_writes(const void *data, int64_t bytes) {
    return (struct mx_gpu_span){data, bytes, true};
}

// A CUDA tensor map of a matrix of bytes, rows `row_bytes` apart: boxes of box_rows x box_bytes, zeros outside the
// matrix. It is a parameter of the kernels; `encoded` is where, 128 bytes, 64-byte aligned.
struct mx_gpu_map {
    void *encoded;
    const void *base;
    int64_t rows, row_bytes;
    uint32_t box_rows, box_bytes;
    enum mx_gpu_swizzle { MX_GPU_SWIZZLE_NONE, MX_GPU_SWIZZLE_32B, MX_GPU_SWIZZLE_64B, MX_GPU_SWIZZLE_128B } swizzle;
};

// A whole call: its launches, in order, and what they all get.
struct mx_gpu_call {
    const struct mx_gpu_launch *launches;
    int32_t launch_count;
    bool overlap;      // all but the first may start before the one before has ended, for which they wait (CUDA)
    void **parameters; // pointers to the kernels' arguments
    const struct mx_gpu_span *spans;
    int32_t span_count;
    const struct mx_gpu_map *maps;
    int32_t map_count;
};

// 0 when the device has the target's architecture; else nonzero, with the reason.
int mx_gpu_available(struct mx_gpu *gpu, int32_t device, struct mx_error *error);

// Encodes the call's maps and queues its launches on its stream, leaving out those with an empty grid. The first call
// on a device loads the modules. On the emulator it also waits, so that a kernel's error is this call's.
int mx_gpu_run(struct mx_gpu *gpu, const struct mx_gpu_call *call, const struct mx_exec *exec, struct mx_error *error);

// The ops whose launches are the same on every GPU. Their kernels need no workspace.
int mx_gpu_quantize(struct mx_gpu *gpu, const struct mx_quantize_args *args, const struct mx_exec *exec,
                    struct mx_error *error);
int mx_gpu_zero_padding(struct mx_gpu *gpu, const struct mx_padding_args *args, const struct mx_exec *exec,
                        struct mx_error *error);
int64_t mx_gpu_no_workspace(const struct mx_quantize_args *args, const struct mx_exec *exec);
