// The one place that talks to a GPU's driver: tables of its functions, found by dlopen, so that the library loads on
// machines without any; modules, loaded once per device; launches. No call allocates device memory or waits for it,
// but for the emulator's.
#include "gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// CUDA's CUlaunchAttribute and CUlaunchConfig, as cuda.h lays them out.
struct launch_attribute {
    int id;
    alignas(8) union {
        char size[64];
        int allowed;
    } value;
};
static_assert(sizeof(struct launch_attribute) == 72 && offsetof(struct launch_attribute, value) == 8);
struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    struct launch_attribute *attributes;
    unsigned attribute_count;
};
static_assert(sizeof(struct launch_config) == 56 && offsetof(struct launch_config, stream) == 32);

// The functions of a driver that are used. What HIP and CUDA have alike comes first.
struct calls {
    int (*init)(unsigned flags);
    int (*load)(void **module, const void *image);
    int (*function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);
    // HIP
    int (*get_device)(int *device);
    int (*set_device)(int device);
    int (*properties)(void *properties, int device);
    const char *(*error_name)(int code);
    const char *(*error_text)(int code);
    // CUDA
    int (*device)(int *device, int index);
    int (*attribute)(int *value, int attribute, int device);
    int (*retain_context)(void **context, int device);
    int (*get_context)(void **context);
    int (*set_context)(void *context);
    int (*set_attribute)(void *function, int attribute, int value);
    int (*launch_early)(const struct launch_config *, void *function, void **parameters, void **extra);
    int (*explain_name)(int code, const char **text);
    int (*explain_text)(int code, const char **text);
    int (*encode_map)(void *map, int type, uint32_t rank, const void *base, const uint64_t *sizes,
                      const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle,
                      int promotion, int fill);
    // HIP, emulated
    int (*host_register)(const void *data, size_t bytes, unsigned flags);
    int (*host_unregister)(const void *data);
    int (*synchronize)(void);
    const char *(*last_error)(void);
    void (*clear_error)(void);
};

struct mx_gpu_driver {
    const char *variable;     // environment variable with the library's path, or
    const char *libraries[4]; // its possible names
    struct symbol {
        const char *name;
        size_t offset; // in struct calls
    } symbols[16];
    // A device's architecture, and how many multiprocessors (compute units) it has.
    int (*describe)(struct mx_gpu_driver *, int32_t device, char target[32], int32_t *processors, struct mx_error *);
    // Makes a device the thread's current one. `previous` is what `leave` needs to bring the one before back.
    int (*enter)(struct mx_gpu_driver *, int32_t device, void **previous, struct mx_error *);
    int (*leave)(struct mx_gpu_driver *, void *previous, struct mx_error *);
    // Lets a kernel have so much dynamic shared memory; null where that needs no asking.
    int (*allow_shared)(struct mx_gpu_driver *, void *function, int32_t bytes, struct mx_error *);
    void (*explain)(const struct calls *, int code, char *text, size_t size);
    // Found at first use.
    atomic_bool opened;
    struct mx_error open_error;
    struct calls calls;
    void *contexts[MX_GPU_DEVICES]; // CUDA: primary ones, once retained
};

// Held while a driver, a context or modules are brought up, which is done once.
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

// Carries a driver's refusal up: the function by the driver's own name, and what the driver says of the code.
static int refused(const struct mx_gpu_driver *driver, size_t offset, int code, struct mx_error *error) {
    const struct symbol *symbol = driver->symbols;
    while (symbol->offset != offset)
        symbol++;
    char text[sizeof error->text];
    driver->explain(&driver->calls, code, text, sizeof text);
    return mx_fail(error, "%s: %s", symbol->name, text);
}
// Nonzero, with the error filled, when a driver's function fails.
#define TRY(driver, error, member, ...)                                                                                \
    try((driver), offsetof(struct calls, member), (driver)->calls.member(__VA_ARGS__), (error))
static int try(const struct mx_gpu_driver *driver, size_t offset, int code, struct mx_error *error) {
    return code ? refused(driver, offset, code, error) : 0;
}

// -------------------------------------------------------------------------------------------------------------- HIP

static int hip_describe(struct mx_gpu_driver *driver, int32_t device, char target[32], int32_t *processors,
                        struct mx_error *error) {
    // hipDeviceProp_tR0600, of ROCm 6.0 and later (hip_runtime_api.h): 1472 bytes, int multiProcessorCount at 388,
    // char gcnArchName[256] at 1160.
    enum { PROPERTIES = 1472, PROCESSORS = 388, ARCH_NAME = 1160 };
    alignas(8) char properties[PROPERTIES] = "";
    if (TRY(driver, error, properties, properties, device))
        return 1;
    const char *name = properties + ARCH_NAME; // "gfx950:sramecc+:xnack-"
    snprintf(target, 32, "%.*s", (int)strcspn(name, ":"), name);
    memcpy(processors, properties + PROCESSORS, sizeof *processors);
    return 0;
}

static int hip_enter(struct mx_gpu_driver *driver, int32_t device, void **previous, struct mx_error *error) {
    int current;
    if (TRY(driver, error, get_device, &current))
        return 1;
    *previous = (void *)(intptr_t)current;
    return current == device ? 0 : TRY(driver, error, set_device, device);
}

static int hip_leave(struct mx_gpu_driver *driver, void *previous, struct mx_error *error) {
    int current;
    if (TRY(driver, error, get_device, &current))
        return 1;
    return current == (int)(intptr_t)previous ? 0 : TRY(driver, error, set_device, (int)(intptr_t)previous);
}

static void hip_explain(const struct calls *calls, int code, char *text, size_t size) {
    const char *detail = calls->last_error ? calls->last_error() : "";
    snprintf(text, size, "%s (%s)%s%s", calls->error_name(code), calls->error_text(code), *detail ? ": " : "", detail);
    if (calls->clear_error)
        calls->clear_error();
}

#define SYMBOL(member, name) {#name, offsetof(struct calls, member)}
// clang-format off
#define HIP_SYMBOLS                                                                                                    \
    SYMBOL(init, hipInit), SYMBOL(load, hipModuleLoadData), SYMBOL(function, hipModuleGetFunction),                    \
    SYMBOL(launch, hipModuleLaunchKernel), SYMBOL(get_device, hipGetDevice), SYMBOL(set_device, hipSetDevice),         \
    SYMBOL(properties, hipGetDevicePropertiesR0600), SYMBOL(error_name, hipGetErrorName),                              \
    SYMBOL(error_text, hipGetErrorString)
// clang-format on

struct mx_gpu_driver mx_hip = {
    .libraries = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"},
    .symbols = {HIP_SYMBOLS},
    .describe = hip_describe,
    .enter = hip_enter,
    .leave = hip_leave,
    .explain = hip_explain,
};

struct mx_gpu_driver mx_hip_emulator = {
    .variable = "MXFP8_EMU_LIBRARY",
    .symbols = {HIP_SYMBOLS, SYMBOL(host_register, hipHostRegister), SYMBOL(host_unregister, hipHostUnregister),
                SYMBOL(synchronize, hipDeviceSynchronize), SYMBOL(last_error, emu_last_error),
                SYMBOL(clear_error, emu_clear_error)},
    .describe = hip_describe,
    .enter = hip_enter,
    .leave = hip_leave,
    .explain = hip_explain,
};

// ------------------------------------------------------------------------------------------------------------- CUDA

static int cuda_describe(struct mx_gpu_driver *driver, int32_t index, char target[32], int32_t *processors,
                         struct mx_error *error) {
    enum { PROCESSORS = 16, MAJOR = 75, MINOR = 76 }; // CU_DEVICE_ATTRIBUTE_*
    int device, major, minor;
    if (TRY(driver, error, device, &device, index) || TRY(driver, error, attribute, &major, MAJOR, device) ||
        TRY(driver, error, attribute, &minor, MINOR, device) ||
        TRY(driver, error, attribute, processors, PROCESSORS, device))
        return 1;
    snprintf(target, 32, "sm_%d%d", major, minor);
    return 0;
}

// The primary context, which is the one that torch uses. It is kept for the life of the process, as torch keeps it.
static int cuda_context(struct mx_gpu_driver *driver, int32_t index, void **context, struct mx_error *error) {
    int device;
    pthread_mutex_lock(&loading);
    *context = driver->contexts[index];
    int failed = !*context &&
                 (TRY(driver, error, device, &device, index) || TRY(driver, error, retain_context, context, device));
    if (!failed)
        driver->contexts[index] = *context;
    pthread_mutex_unlock(&loading);
    return failed;
}

static int cuda_enter(struct mx_gpu_driver *driver, int32_t index, void **previous, struct mx_error *error) {
    void *context;
    if (cuda_context(driver, index, &context, error) || TRY(driver, error, get_context, previous))
        return 1;
    return *previous == context ? 0 : TRY(driver, error, set_context, context);
}

static int cuda_leave(struct mx_gpu_driver *driver, void *previous, struct mx_error *error) {
    void *current;
    if (TRY(driver, error, get_context, &current))
        return 1;
    return current == previous ? 0 : TRY(driver, error, set_context, previous);
}

static int cuda_allow_shared(struct mx_gpu_driver *driver, void *function, int32_t bytes, struct mx_error *error) {
    enum { MAX_DYNAMIC_SHARED = 8 }; // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return bytes ? TRY(driver, error, set_attribute, function, MAX_DYNAMIC_SHARED, bytes) : 0;
}

static void cuda_explain(const struct calls *calls, int code, char *text, size_t size) {
    const char *name, *detail;
    if (calls->explain_name(code, &name) || calls->explain_text(code, &detail))
        snprintf(text, size, "an unknown error (%d)", code);
    else
        snprintf(text, size, "%s (%s)", name, detail);
}

struct mx_gpu_driver mx_cuda = {
    .libraries = {"libcuda.so.1"},
    .symbols = {SYMBOL(init, cuInit), SYMBOL(load, cuModuleLoadData), SYMBOL(function, cuModuleGetFunction),
                SYMBOL(launch, cuLaunchKernel), SYMBOL(device, cuDeviceGet), SYMBOL(attribute, cuDeviceGetAttribute),
                SYMBOL(retain_context, cuDevicePrimaryCtxRetain), SYMBOL(get_context, cuCtxGetCurrent),
                SYMBOL(set_context, cuCtxSetCurrent), SYMBOL(set_attribute, cuFuncSetAttribute),
                SYMBOL(launch_early, cuLaunchKernelEx), SYMBOL(explain_name, cuGetErrorName),
                SYMBOL(explain_text, cuGetErrorString), SYMBOL(encode_map, cuTensorMapEncodeTiled)},
    .describe = cuda_describe,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .allow_shared = cuda_allow_shared,
    .explain = cuda_explain,
};

// A matrix without elements has no map; no kernel asks for it.
static int encode_map(struct mx_gpu_driver *driver, const struct mx_gpu_map *map, struct mx_error *error) {
    enum { UINT8 = 0, RANK = 2, NO_INTERLEAVE = 0, PROMOTE_128B = 2, ZEROS = 0 }; // CUtensorMap*
    const uint64_t sizes[RANK] = {(uint64_t)map->row_bytes, (uint64_t)map->rows}, stride = (uint64_t)map->row_bytes;
    const uint32_t box[RANK] = {map->box_bytes, map->box_rows}, steps[RANK] = {1, 1};
    if (!map->rows || !map->row_bytes)
        return 0;
    return TRY(driver, error, encode_map, map->encoded, UINT8, RANK, map->base, sizes, &stride, box, steps,
               NO_INTERLEAVE, map->swizzle, PROMOTE_128B, ZEROS);
}

// ----------------------------------------------------------------------------------------------------------- opening

// torch brings its own copy of the library, and a process must have only one: what is loaded already comes first.
static void *open_library(const struct mx_gpu_driver *driver, struct mx_error *error) {
    if (driver->variable) {
        const char *path = getenv(driver->variable);
        void *library = path ? dlopen(path, RTLD_NOW) : nullptr;
        if (!library)
            mx_fail(error, "%s must be the emulator's path, %s", driver->variable, path ? dlerror() : "and is not set");
        return library;
    }
    static const int modes[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW};
    for (int m = 0; m < MX_LENGTH(modes); m++)
        for (int i = 0; driver->libraries[i]; i++) {
            void *library = dlopen(driver->libraries[i], modes[m]);
            if (library)
                return library;
        }
    mx_fail(error, "%s", dlerror());
    return nullptr;
}

static int open_driver(struct mx_gpu_driver *driver, struct mx_error *error) {
    void *library = open_library(driver, error);
    if (!library)
        return 1;
    for (const struct symbol *symbol = driver->symbols; symbol->name; symbol++) {
        void *address = dlsym(library, symbol->name);
        if (!address)
            return mx_fail(error, "%s", dlerror());
        memcpy((char *)&driver->calls + symbol->offset, (const void *)&address, sizeof address);
    }
    return TRY(driver, error, init, 0);
}

// Looks for the driver once; what came of it is kept.
static int opened(struct mx_gpu_driver *driver, struct mx_error *error) {
    if (!atomic_load(&driver->opened)) {
        pthread_mutex_lock(&loading);
        if (!atomic_load(&driver->opened))
            open_driver(driver, &driver->open_error);
        atomic_store(&driver->opened, true);
        pthread_mutex_unlock(&loading);
    }
    return driver->open_error.text[0] ? mx_fail(error, "%s", driver->open_error.text) : 0;
}

int mx_gpu_available(struct mx_gpu *gpu, int32_t device, struct mx_error *error) {
    if (device < 0 || device >= MX_GPU_DEVICES)
        return mx_fail(error, "device index %d, expected less than %d", device, MX_GPU_DEVICES);
    struct mx_gpu_device *state = &gpu->devices[device];
    if (atomic_load(&state->matches))
        return 0;
    char target[32];
    int32_t processors;
    if (opened(gpu->driver, error) || gpu->driver->describe(gpu->driver, device, target, &processors, error))
        return 1;
    if (strcmp(target, gpu->target) != 0)
        return mx_fail(error, "device %d is %s, expected %s", device, target, gpu->target);
    state->processors = processors;
    atomic_store(&state->matches, true);
    return 0;
}

// ----------------------------------------------------------------------------------------------------------- calling

// Modules are never unloaded: they live as long as the process, like the library.
static int load_modules(struct mx_gpu *gpu, struct mx_gpu_device *device, struct mx_error *error) {
    void *modules[MX_GPU_KERNELS];
    for (int i = 0; i < gpu->image_count; i++)
        if (TRY(gpu->driver, error, load, &modules[i], gpu->images[i]))
            return 1;
    for (int i = 0; i < gpu->kernel_count; i++) {
        const struct mx_gpu_kernel *kernel = &gpu->kernels[i];
        void **function = &device->functions[i];
        if (TRY(gpu->driver, error, function, function, modules[kernel->image], kernel->name))
            return 1;
        if (gpu->driver->allow_shared && gpu->driver->allow_shared(gpu->driver, *function, kernel->shared, error))
            return 1;
    }
    return 0;
}

static int loaded(struct mx_gpu *gpu, struct mx_gpu_device *device, struct mx_error *error) {
    if (atomic_load(&device->loaded))
        return 0;
    pthread_mutex_lock(&loading);
    int failed = !atomic_load(&device->loaded) && load_modules(gpu, device, error);
    atomic_store(&device->loaded, !failed);
    pthread_mutex_unlock(&loading);
    return failed;
}

static bool is_empty(const struct mx_gpu_launch *launch) {
    return !launch->grid[0] || !launch->grid[1] || !launch->grid[2];
}

// A call's launches are all or none: what a grid cannot hold is found before the first. HIP counts a grid's threads in
// 32 bits; CUDA's limit is higher.
static int check_grids(const struct mx_gpu_call *call, struct mx_error *error) {
    for (const struct mx_gpu_launch *l = call->launches; l < call->launches + call->launch_count; l++)
        if ((uint64_t)l->grid[0] * l->threads > UINT32_MAX)
            return mx_fail(error, "the operands need %u blocks of %u threads, more than a grid holds", l->grid[0],
                           l->threads);
    return 0;
}

static int launch(struct mx_gpu *gpu, const struct mx_gpu_device *device, const struct mx_gpu_launch *launch,
                  void **parameters, bool early, void *stream, struct mx_error *error) {
    const uint32_t *grid = launch->grid;
    const unsigned shared = (unsigned)gpu->kernels[launch->kernel].shared;
    void *function = device->functions[launch->kernel];
    if (is_empty(launch))
        return 0;
    if (early && gpu->driver->calls.launch_early) {
        struct launch_attribute attribute = {.id = 6, .value.allowed = 1}; // PROGRAMMATIC_STREAM_SERIALIZATION
        const struct launch_config config = {
            {grid[0], grid[1], grid[2]}, {launch->threads, 1, 1}, shared, stream, &attribute, 1};
        return TRY(gpu->driver, error, launch_early, &config, function, parameters, nullptr);
    }
    return TRY(gpu->driver, error, launch, function, grid[0], grid[1], grid[2], launch->threads, 1, 1, shared, stream,
               parameters, nullptr);
}

static int queue(struct mx_gpu *gpu, const struct mx_gpu_call *call, int32_t index, void *stream,
                 struct mx_error *error) {
    struct mx_gpu_device *device = &gpu->devices[index];
    void *previous;
    if (check_grids(call, error) || gpu->driver->enter(gpu->driver, index, &previous, error))
        return 1;
    int failed = loaded(gpu, device, error);
    for (int i = 0; !failed && i < call->map_count; i++)
        failed = encode_map(gpu->driver, &call->maps[i], error);
    for (int i = 0; !failed && i < call->launch_count; i++)
        failed = launch(gpu, device, &call->launches[i], call->parameters, call->overlap && i, stream, error);
    struct mx_error second;
    return gpu->driver->leave(gpu->driver, previous, failed ? &second : error) || failed;
}

// Operands may be one tensor twice. A span is shown to the emulator at its first mention.
static bool is_new(const struct mx_gpu_span *spans, int index) {
    for (int i = 0; i < index; i++)
        if (spans[i].data == spans[index].data && spans[i].bytes == spans[index].bytes)
            return false;
    return spans[index].bytes;
}

static int emulate(struct mx_gpu *gpu, const struct mx_gpu_call *call, struct mx_error *error) {
    enum { READ_ONLY = 8 }; // hipHostRegisterReadOnly
    const struct mx_gpu_span *spans = call->spans;
    int shown = 0, failed = 0;
    for (; !failed && shown < call->span_count; shown++)
        failed = is_new(spans, shown) && TRY(gpu->driver, error, host_register, spans[shown].data,
                                             (size_t)spans[shown].bytes, spans[shown].written ? 0 : READ_ONLY);
    if (failed)
        shown--;
    failed = failed || queue(gpu, call, 0, nullptr, error) || TRY(gpu->driver, error, synchronize);
    while (shown--)
        if (is_new(spans, shown))
            gpu->driver->calls.host_unregister(spans[shown].data);
    return failed;
}

int mx_gpu_run(struct mx_gpu *gpu, const struct mx_gpu_call *call, const struct mx_exec *exec, struct mx_error *error) {
    if (!gpu->driver->calls.host_register)
        return queue(gpu, call, exec->device, exec->stream, error);
    // One call at a time: two may read the same tensor.
    static pthread_mutex_t emulating = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&emulating);
    int failed = emulate(gpu, call, error);
    pthread_mutex_unlock(&emulating);
    return failed;
}

// ------------------------------------------------------------------------------------------- quantize, zero_padding

enum { THREADS = 256 }; // of a block

// Token tiles of the quantizers' contract, spread over two axes of the grid.
static struct mx_gpu_launch quantize_launch(const struct mx_quantize_args *args) {
    enum { TILE = MX_GROUP_ALIGN, AXIS = 32768 };
    const int kernel = args->wants == MX_ROWS   ? MX_GPU_QUANTIZE_ROWS
                       : args->wants == MX_COLS ? MX_GPU_QUANTIZE_COLS
                                                : MX_GPU_QUANTIZE_BOTH;
    int64_t tiles = args->batch * div_up(args->rows, TILE);
    if (kernel == MX_GPU_QUANTIZE_ROWS)
        tiles = div_up(args->batch * args->rows, TILE);
    else if (args->grouped)
        tiles = (kernel == MX_GPU_QUANTIZE_BOTH ? mx_padded_tokens(args->rows, args->groups + 1) : args->col_k) / TILE;
    int64_t y = tiles < AXIS ? tiles : AXIS;
    return (struct mx_gpu_launch){
        kernel + args->x_type,
        THREADS,
        {(uint32_t)div_up(args->cols, TILE), (uint32_t)y, (uint32_t)(y ? div_up(tiles, y) : 0)},
    };
}

int mx_gpu_quantize(struct mx_gpu *gpu, const struct mx_quantize_args *args, const struct mx_exec *exec,
                    struct mx_error *error) {
    struct mx_quantize_args copy = *args;
    const struct mx_gpu_launch launch = quantize_launch(args);
    const int64_t row = args->wants & MX_ROWS ? args->batch * args->rows * args->row_k : 0;
    const int64_t col = args->wants & MX_COLS ? args->batch * args->cols * args->col_k : 0;
    const struct mx_gpu_span spans[] = {
        mx_gpu_reads(args->x, args->batch * args->rows * args->cols * mx_type_bytes(args->x_type)),
        mx_gpu_reads(args->offs, args->groups * 4),
        mx_gpu_writes(args->row_data, row),
        mx_gpu_writes(args->row_scale, row / MX_BLOCK),
        mx_gpu_writes(args->col_data, col),
        mx_gpu_writes(args->col_scale, col / MX_BLOCK),
    };
    const struct mx_gpu_call call = {
        .launches = &launch,
        .launch_count = 1,
        .parameters = (void *[]){&copy},
        .spans = spans,
        .span_count = MX_LENGTH(spans),
    };
    return mx_gpu_run(gpu, &call, exec, error);
}

int64_t mx_gpu_no_workspace(const struct mx_quantize_args *, const struct mx_exec *) { return 0; }

int mx_gpu_zero_padding(struct mx_gpu *gpu, const struct mx_padding_args *args, const struct mx_exec *exec,
                        struct mx_error *error) {
    enum { ROWS_PER_BLOCK = 4, BYTES_PER_BLOCK = 1 << 14, MOST_BLOCKS = 64 };
    struct mx_padding_args copy = *args;
    const int64_t blocks = div_up(args->depth, BYTES_PER_BLOCK), bytes = args->rows * args->depth;
    const struct mx_gpu_launch launch = {
        MX_GPU_ZERO_PADDING,
        THREADS,
        {(uint32_t)div_up(args->rows, ROWS_PER_BLOCK), (uint32_t)min64(blocks, MOST_BLOCKS), 1},
    };
    const struct mx_gpu_span spans[] = {
        mx_gpu_writes(args->data, bytes),
        mx_gpu_writes(args->scale, bytes / MX_BLOCK),
        mx_gpu_reads(args->offs, args->groups * 4),
    };
    const struct mx_gpu_call call = {
        .launches = &launch,
        .launch_count = 1,
        .parameters = (void *[]){&copy},
        .spans = spans,
        .span_count = MX_LENGTH(spans),
    };
    return mx_gpu_run(gpu, &call, exec, error);
}
