// What the GPU backends share: drivers found at run time, modules loaded once per device, launches on torch's stream.
// A backend's file (gfx950.c) holds its struct mx_gpu, the launches of each op, and its struct mx_backend.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>

#include "mxfp8.h"

enum { MX_GPU_DEVICES = 64, MX_GPU_KERNELS = 128 };

struct mx_gpu_kernel {
    const char *name;
    int32_t image; // index into the images
};

struct mx_gpu_driver; // csrc/gpu.c's table of a driver's functions
extern struct mx_gpu_driver mx_hip, mx_hip_emulator;

// One architecture on one driver: its description, then what has been loaded.
struct mx_gpu {
    const char *target; // the architecture's name, as the driver gives it for a device
    struct mx_gpu_driver *driver;
    const void *const *images; // code objects (HIP), built into this library
    const struct mx_gpu_kernel *kernels;
    int32_t image_count, kernel_count;
    struct mx_gpu_device {
        atomic_bool matches, loaded;
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

// A whole call: its launches, in order, and what they all get.
struct mx_gpu_call {
    const struct mx_gpu_launch *launches;
    int32_t launch_count, span_count;
    void **parameters; // pointers to the kernels' arguments
    const struct mx_gpu_span *spans;
};

// 0 when the device has the target's architecture; else nonzero, with the reason.
int mx_gpu_available(struct mx_gpu *gpu, int32_t device, struct mx_error *error);

// Queues the call's launches on its stream, leaving out those with an empty grid. The first call on a device loads the
// modules. On the emulator it also waits, so that a kernel's error is this call's.
int mx_gpu_run(struct mx_gpu *gpu, const struct mx_gpu_call *call, const struct mx_exec *exec, struct mx_error *error);
