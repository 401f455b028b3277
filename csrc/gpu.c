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
    // The architecture of a device.
    int (*target)(struct mx_gpu_driver *, int32_t device, char text[32], struct mx_error *);
    // Makes a device the thread's current one; `previous` is what makes it the one before again.
    int (*enter)(struct mx_gpu_driver *, int32_t device, int *previous, struct mx_error *);
    void (*explain)(const struct calls *, int code, char *text, size_t size);
    // Found at first use.
    atomic_bool opened;
    struct mx_error open_error;
    struct calls calls;
};

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

static int hip_target(struct mx_gpu_driver *driver, int32_t device, char text[32], struct mx_error *error) {
    // hipDeviceProp_tR0600, of ROCm 6.0 and later (hip_runtime_api.h): 1472 bytes, gcnArchName[256] at 1160.
    enum { PROPERTIES = 1472, ARCH_NAME = 1160 };
    alignas(8) char properties[PROPERTIES] = "";
    if (TRY(driver, error, properties, properties, device))
        return 1;
    const char *name = properties + ARCH_NAME; // "gfx950:sramecc+:xnack-"
    snprintf(text, 32, "%.*s", (int)strcspn(name, ":"), name);
    return 0;
}

static int hip_enter(struct mx_gpu_driver *driver, int32_t device, int *previous, struct mx_error *error) {
    if (TRY(driver, error, get_device, previous))
        return 1;
    return *previous == device ? 0 : TRY(driver, error, set_device, device);
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
    .target = hip_target,
    .enter = hip_enter,
    .explain = hip_explain,
};

struct mx_gpu_driver mx_hip_emulator = {
    .variable = "MXFP8_EMU_LIBRARY",
    .symbols = {HIP_SYMBOLS, SYMBOL(host_register, hipHostRegister), SYMBOL(host_unregister, hipHostUnregister),
                SYMBOL(synchronize, hipDeviceSynchronize), SYMBOL(last_error, emu_last_error),
                SYMBOL(clear_error, emu_clear_error)},
    .target = hip_target,
    .enter = hip_enter,
    .explain = hip_explain,
};

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
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
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
    if (atomic_load(&gpu->devices[device].matches))
        return 0;
    char target[32];
    if (opened(gpu->driver, error) || gpu->driver->target(gpu->driver, device, target, error))
        return 1;
    if (strcmp(target, gpu->target) != 0)
        return mx_fail(error, "device %d is %s, expected %s", device, target, gpu->target);
    atomic_store(&gpu->devices[device].matches, true);
    return 0;
}

// ----------------------------------------------------------------------------------------------------------- calling

// Modules are never unloaded: they live as long as the process, like the library.
static int load_modules(struct mx_gpu *gpu, struct mx_gpu_device *device, struct mx_error *error) {
    void *modules[MX_GPU_KERNELS];
    for (int i = 0; i < gpu->image_count; i++)
        if (TRY(gpu->driver, error, load, &modules[i], gpu->images[i]))
            return 1;
    for (int i = 0; i < gpu->kernel_count; i++)
        if (TRY(gpu->driver, error, function, &device->functions[i], modules[gpu->kernels[i].image],
                gpu->kernels[i].name))
            return 1;
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

// A call's launches are all or none: what a grid cannot hold is found before the first.
static int check_grids(const struct mx_gpu_call *call, struct mx_error *error) {
    for (const struct mx_gpu_launch *l = call->launches; l < call->launches + call->launch_count; l++)
        if ((uint64_t)l->grid[0] * l->threads > UINT32_MAX) // HIP counts a grid's threads in 32 bits
            return mx_fail(error, "the operands need %u blocks of %u threads, more than a grid holds", l->grid[0],
                           l->threads);
    return 0;
}

static int launch(struct mx_gpu *gpu, const struct mx_gpu_device *device, const struct mx_gpu_launch *launch,
                  void **parameters, void *stream, struct mx_error *error) {
    const uint32_t *grid = launch->grid;
    if (is_empty(launch))
        return 0;
    return TRY(gpu->driver, error, launch, device->functions[launch->kernel], grid[0], grid[1], grid[2],
               launch->threads, 1, 1, 0, stream, parameters, nullptr);
}

static int queue(struct mx_gpu *gpu, const struct mx_gpu_call *call, int32_t index, void *stream,
                 struct mx_error *error) {
    struct mx_gpu_device *device = &gpu->devices[index];
    int previous, failed;
    if (check_grids(call, error) || gpu->driver->enter(gpu->driver, index, &previous, error))
        return 1;
    failed = loaded(gpu, device, error);
    for (int i = 0; !failed && i < call->launch_count; i++)
        failed = launch(gpu, device, &call->launches[i], call->parameters, stream, error);
    struct mx_error second;
    return gpu->driver->enter(gpu->driver, previous, &previous, failed ? &second : error) || failed;
}

// Operands may be one tensor twice. A span is opened to kernels by its first mention.
static bool is_new(const struct mx_gpu_span *spans, int index) {
    for (int i = 0; i < index; i++)
        if (spans[i].data == spans[index].data && spans[i].bytes == spans[index].bytes)
            return false;
    return spans[index].data && spans[index].bytes;
}

static int emulate(struct mx_gpu *gpu, const struct mx_gpu_call *call, struct mx_error *error) {
    enum { READ_ONLY = 8 }; // hipHostRegisterReadOnly
    const struct mx_gpu_span *spans = call->spans;
    int opened = 0, failed = 0;
    for (; !failed && opened < call->span_count; opened++)
        failed = is_new(spans, opened) && TRY(gpu->driver, error, host_register, spans[opened].data,
                                              (size_t)spans[opened].bytes, spans[opened].written ? 0 : READ_ONLY);
    if (failed)
        opened--;
    failed = failed || queue(gpu, call, 0, nullptr, error) || TRY(gpu->driver, error, synchronize);
    while (opened--)
        if (is_new(spans, opened))
            gpu->driver->calls.host_unregister(spans[opened].data);
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
