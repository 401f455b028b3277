// Stands in for the dynamic loader, and for libamdhip64 and libcuda, under csrc/gpu.c, which is compiled with dlopen,
// dlsym and dlerror renamed to the functions here (tests/test_launcher.py). Every call is a line of a log; any can be
// told to fail; devices are as many, and of such an architecture, as the test says. No GPU is involved: a launch is
// only its line. What the real functions refuse and the launcher has to keep to is refused here as well.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../csrc/mxfp8.h"
#include "../kernels/gfx950/plan.h"
#include "../kernels/sm90/plan.h"

#define EXPORT [[gnu::visibility("default")]]

int mx_fail(struct mx_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return 1;
}

extern const struct mx_backend mx_gfx950, mx_gfx950_emulator, mx_sm90;

EXPORT const struct mx_backend *fake_backend(const char *name) {
    static const struct mx_backend *const backends[] = {&mx_gfx950, &mx_gfx950_emulator, &mx_sm90};
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(backends[i]->name, name) == 0)
            return backends[i];
    return nullptr;
}

// --------------------------------------------------------------------------------------- what the test says and reads

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 20];
static size_t log_used;
static char failing[64], missing[64], architecture[64];
static int fails_in, fail_code, devices, library_absent;

EXPORT void fake_fail(const char *function, int nth, int code) {
    snprintf(failing, sizeof failing, "%s", function);
    fails_in = nth;
    fail_code = code;
}
EXPORT void fake_library(int absent, const char *missing_symbol) {
    library_absent = absent;
    snprintf(missing, sizeof missing, "%s", missing_symbol);
}
EXPORT void fake_devices(int count, const char *name) {
    devices = count;
    snprintf(architecture, sizeof architecture, "%s", name);
}
EXPORT const char *fake_log(void) { return log_text; }
EXPORT void fake_clear(void) { log_text[log_used = 0] = 0; }

// Notes a call. The code that it is to fail with, or 0.
[[gnu::format(printf, 2, 3)]] static int note(const char *function, const char *format, ...) {
    char detail[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    int length = snprintf(log_text + log_used, sizeof log_text - log_used, "%s %s\n", function, detail);
    log_used += (size_t)length;
    if (log_used >= sizeof log_text)
        abort();
    int code = strcmp(function, failing) == 0 && --fails_in == 0 ? fail_code : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

// -------------------------------------------------------------------------------------------------- modules, launches

enum { DEVICE_ERROR = 101, CONTEXT_ERROR = 201, VALUE_ERROR = 1, NO_DEVICE = -1 };

struct function {
    int device;
    unsigned shared; // most bytes of dynamic shared memory
    char name[96];
};

static struct function *make_function(int device, const char *name, size_t length) {
    struct function *made = calloc(1, sizeof *made);
    *made = (struct function){.device = device, .shared = 48 * 1024};
    snprintf(made->name, sizeof made->name, "%.*s", (int)length, name);
    return made;
}

// A module is its image's first bytes and the device that was current. Slow, so that a second loader would be seen.
static int note_load(const char *function, void **module, const void *image, int on) {
    usleep(2000);
    struct function *made = make_function(on, image, 16);
    *module = made;
    return note(function, "%s on %d", made->name, on);
}

static int note_function(const char *function, void **to, void *module, const char *name) {
    const struct function *from = module;
    *to = make_function(from->device, name, strlen(name));
    return note(function, "%s of %s on %d", name, from->name, from->device);
}

struct dimensions {
    unsigned x, y, z;
};

// What of a GEMM's parameters shows that they are the right ones: the plan's grids, and the bases in the tensor maps.
struct parameters {
    int prepare_blocks, blocks;
    const void *p_base, *q_base;
};

static int note_launch(const char *function, const struct function *of, int on, struct dimensions grid,
                       struct dimensions block, unsigned shared, void *stream, struct parameters parameters) {
    return note(function, "%s of %d on %d grid %u %u %u block %u %u %u shared %u stream %llu plan %d %d maps %llu %llu",
                of->name, of->device, on, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                (unsigned long long)(uintptr_t)stream, parameters.prepare_blocks, parameters.blocks,
                (unsigned long long)(uintptr_t)parameters.p_base, (unsigned long long)(uintptr_t)parameters.q_base);
}

// The GEMMs' kernels get a plan as their second argument; the others' grids are not planned.
static bool has_plan(const struct function *of) { return strstr(of->name, "prepare") || strstr(of->name, "gemm"); }

static const char *text_of(int code) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "text of %d", code);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------- HIP

static _Thread_local int hip_current;

static int hip_init(unsigned flags) { return note("hipInit", "%u", flags); }

static int hip_get_device(int *device) {
    *device = hip_current;
    return note("hipGetDevice", "-> %d", hip_current);
}

static int hip_set_device(int device) {
    int code = note("hipSetDevice", "%d", device);
    if (!code && (device < 0 || device >= devices))
        code = DEVICE_ERROR;
    if (!code)
        hip_current = device;
    return code;
}

static int hip_properties(void *to, int device) {
    int code = note("hipGetDevicePropertiesR0600", "%d", device);
    if (code || device >= devices)
        return code ? code : DEVICE_ERROR;
    memset(to, 0x5a, 1472); // the size of hipDeviceProp_tR0600; gcnArchName is at 1160
    snprintf((char *)to + 1160, 256, "%s", architecture);
    return 0;
}

static int hip_load(void **module, const void *image) {
    return note_load("hipModuleLoadData", module, image, hip_current);
}

static int hip_function(void **function, void *module, const char *name) {
    return note_function("hipModuleGetFunction", function, module, name);
}

static int hip_launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    if (!parameters || extra)
        return VALUE_ERROR;
    const struct mx_gfx950_plan none = {}, *plan = has_plan(function) ? parameters[1] : &none;
    return note_launch("hipModuleLaunchKernel", function, hip_current, (struct dimensions){gx, gy, gz},
                       (struct dimensions){bx, by, bz}, shared, stream,
                       (struct parameters){plan->prepare_blocks, plan->blocks, nullptr, nullptr});
}

static const char *hip_error_name(int code) { return code == DEVICE_ERROR ? "hipErrorInvalidDevice" : "hipErrorTest"; }

// Of the emulator alone.
static int host_register(const void *data, size_t bytes, unsigned flags) {
    return note("hipHostRegister", "%llu %zu %u", (unsigned long long)(uintptr_t)data, bytes, flags);
}
static int host_unregister(const void *data) {
    return note("hipHostUnregister", "%llu", (unsigned long long)(uintptr_t)data);
}
static int synchronize(void) { return note("hipDeviceSynchronize", ""); }
static const char *last_error(void) { return "what the emulator says"; }
static void clear_error(void) { note("emu_clear_error", ""); }

// --------------------------------------------------------------------------------------------------------------- CUDA

// A context is a byte here: of the primary ones, of which each device has one, or of others, which the process made.
static char primary[128], other[128];
static _Thread_local char *context; // null at first, as in a thread that has not called CUDA's runtime
enum { HANDLE = 500 };              // a device's handle is its index and so much: they are not the same

// The device whose primary context this is; of another one, OTHER_CONTEXT more.
enum { OTHER_CONTEXT = 1000 };
static int device_of(const char *of) {
    if (!of)
        return NO_DEVICE;
    return (int)(of >= other && of < other + sizeof other ? of - other + OTHER_CONTEXT : of - primary);
}
static int cuda_current(void) { return device_of(context); }

static int cuda_init(unsigned flags) { return note("cuInit", "%u", flags); }

static int cuda_device(int *device, int index) {
    *device = index + HANDLE;
    int code = note("cuDeviceGet", "%d", index);
    return code || index < devices ? code : DEVICE_ERROR;
}

// Devices differ in their number of multiprocessors. The architecture is "<major>.<minor>".
static int cuda_attribute(int *value, int attribute, int device) {
    enum { PROCESSORS = 16, MAJOR = 75, MINOR = 76 };
    int major = 0, minor = 0;
    sscanf(architecture, "%d.%d", &major, &minor);
    *value = attribute == PROCESSORS ? 132 + device - HANDLE : attribute == MAJOR ? major : minor;
    int code = note("cuDeviceGetAttribute", "%d of %d", attribute, device - HANDLE);
    return code || attribute == PROCESSORS || attribute == MAJOR || attribute == MINOR ? code : VALUE_ERROR;
}

static int cuda_retain(void **to, int device) {
    int code = note("cuDevicePrimaryCtxRetain", "%d", device - HANDLE);
    *to = code ? other : &primary[device - HANDLE];
    return code;
}

static int cuda_get_context(void **to) {
    *to = context;
    return note("cuCtxGetCurrent", "-> %d", cuda_current());
}

static int cuda_set_context(void *to) {
    const int wanted = device_of(to);
    int code = note("cuCtxSetCurrent", "%d", wanted);
    if (!code && wanted >= devices && wanted < OTHER_CONTEXT)
        code = DEVICE_ERROR;
    if (!code)
        context = to;
    return code;
}

static int cuda_load(void **module, const void *image) {
    int code = note_load("cuModuleLoadData", module, image, cuda_current());
    return code || context ? code : CONTEXT_ERROR;
}

static int cuda_function(void **function, void *module, const char *name) {
    int code = note_function("cuModuleGetFunction", function, module, name);
    return code || context ? code : CONTEXT_ERROR;
}

static int cuda_set_attribute(void *function, int attribute, int value) {
    enum { MAX_DYNAMIC_SHARED = 8 };
    struct function *of = function;
    int code =
        note("cuFuncSetAttribute", "%s of %d on %d: %d %d", of->name, of->device, cuda_current(), attribute, value);
    if (!code && !context)
        code = CONTEXT_ERROR;
    if (!code && attribute == MAX_DYNAMIC_SHARED)
        of->shared = (unsigned)value;
    return code;
}

// A map holds the matrix's base.
static int cuda_encode(void *map, int type, uint32_t rank, const void *base, const uint64_t *sizes,
                       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle,
                       int promotion, int fill) {
    int code = note("cuTensorMapEncodeTiled",
                    "on %d base %llu type %d rank %u sizes %llu %llu stride %llu box %u %u steps %u %u interleave %d "
                    "swizzle %d promotion %d fill %d",
                    cuda_current(), (unsigned long long)(uintptr_t)base, type, rank, (unsigned long long)sizes[0],
                    (unsigned long long)sizes[1], (unsigned long long)strides[0], box[0], box[1], steps[0], steps[1],
                    interleave, swizzle, promotion, fill);
    if (!code && !context)
        code = CONTEXT_ERROR;
    if (!code && ((uintptr_t)map % 64 || (uintptr_t)base % 16 || strides[0] % 16 || !sizes[0] || !sizes[1]))
        code = VALUE_ERROR;
    if (!code)
        memcpy(map, &base, sizeof base);
    return code;
}

static int launch_cuda(const char *name, const struct function *of, struct dimensions grid, struct dimensions block,
                       unsigned shared, void *stream, void **parameters, void **extra) {
    if (!context)
        return CONTEXT_ERROR;
    if (!parameters || extra || shared > of->shared)
        return VALUE_ERROR;
    struct parameters seen = {};
    if (has_plan(of)) {
        const struct mx_sm90_plan *plan = parameters[1];
        const struct mx_sm90_maps *maps = parameters[2];
        if ((uintptr_t)maps % 64)
            return VALUE_ERROR;
        seen = (struct parameters){.prepare_blocks = plan->prepare_blocks, .blocks = plan->blocks};
        memcpy(&seen.p_base, maps->p, sizeof seen.p_base);
        memcpy(&seen.q_base, maps->q, sizeof seen.q_base);
    }
    return note_launch(name, of, cuda_current(), grid, block, shared, stream, seen);
}

static int cuda_launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *stream, void **parameters, void **extra) {
    return launch_cuda("cuLaunchKernel", function, (struct dimensions){gx, gy, gz}, (struct dimensions){bx, by, bz},
                       shared, stream, parameters, extra);
}

// Takes no attribute but the one that lets a kernel start early.
static int cuda_launch_ex(const void *config, void *function, void **parameters, void **extra) {
    enum { STREAM_AT = 32, ATTRIBUTES_AT = 40, COUNT_AT = 48, PROGRAMMATIC_STREAM_SERIALIZATION = 6, VALUE_AT = 8 };
    const char *bytes = config, *attribute;
    unsigned sizes[7], count;
    void *stream;
    int id, allowed;
    memcpy(sizes, bytes, sizeof sizes);
    memcpy(&stream, bytes + STREAM_AT, sizeof stream);
    memcpy(&attribute, bytes + ATTRIBUTES_AT, sizeof attribute);
    memcpy(&count, bytes + COUNT_AT, sizeof count);
    memcpy(&id, attribute, sizeof id);
    memcpy(&allowed, attribute + VALUE_AT, sizeof allowed);
    if (count != 1 || id != PROGRAMMATIC_STREAM_SERIALIZATION || allowed != 1)
        return VALUE_ERROR;
    return launch_cuda("cuLaunchKernelEx", function, (struct dimensions){sizes[0], sizes[1], sizes[2]},
                       (struct dimensions){sizes[3], sizes[4], sizes[5]}, sizes[6], stream, parameters, extra);
}

// As the driver does, gives a null text for a code that it does not know: here, all negative ones.
static int cuda_error_name(int code, const char **name) {
    *name = code < 0 ? nullptr : code == DEVICE_ERROR ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_TEST";
    return code < 0 ? VALUE_ERROR : 0;
}
static int cuda_error_text(int code, const char **text) {
    *text = code < 0 ? nullptr : text_of(code);
    return code < 0 ? VALUE_ERROR : 0;
}

// What is current in this thread: HIP's device, or CUDA's context as device_of tells it.
EXPORT void fake_set_current(int device) {
    hip_current = device;
    context = device == NO_DEVICE       ? nullptr
              : device >= OTHER_CONTEXT ? other + device - OTHER_CONTEXT
                                        : primary + device;
}
EXPORT int fake_current(int cuda) { return cuda ? cuda_current() : hip_current; }

// ------------------------------------------------------------------------------------------------- the dynamic loader

static _Thread_local char loader_error[128];
static int forbidden(void) { return note("forbidden", ""); } // whatever else a driver is asked for

void *fake_dlopen(const char *name, int mode);
void *fake_dlsym(void *library, const char *name);
char *fake_dlerror(void);

void *fake_dlopen(const char *name, int mode) {
    static char library;
    note("dlopen", "%s %d", name, mode);
    snprintf(loader_error, sizeof loader_error, "%s: cannot open shared object file", name);
    return library_absent ? nullptr : &library;
}

void *fake_dlsym(void *library, const char *name) {
    static const struct {
        const char *name;
        void (*address)(void);
    } table[] = {
#define ENTRY(name, function) {name, (void (*)(void))(function)}
        ENTRY("hipInit", hip_init),
        ENTRY("hipGetDevice", hip_get_device),
        ENTRY("hipSetDevice", hip_set_device),
        ENTRY("hipGetDevicePropertiesR0600", hip_properties),
        ENTRY("hipModuleLoadData", hip_load),
        ENTRY("hipModuleGetFunction", hip_function),
        ENTRY("hipModuleLaunchKernel", hip_launch),
        ENTRY("hipGetErrorName", hip_error_name),
        ENTRY("hipGetErrorString", text_of),
        ENTRY("hipHostRegister", host_register),
        ENTRY("hipHostUnregister", host_unregister),
        ENTRY("hipDeviceSynchronize", synchronize),
        ENTRY("emu_last_error", last_error),
        ENTRY("emu_clear_error", clear_error),
        ENTRY("cuInit", cuda_init),
        ENTRY("cuDeviceGet", cuda_device),
        ENTRY("cuDeviceGetAttribute", cuda_attribute),
        ENTRY("cuDevicePrimaryCtxRetain", cuda_retain),
        ENTRY("cuCtxGetCurrent", cuda_get_context),
        ENTRY("cuCtxSetCurrent", cuda_set_context),
        ENTRY("cuModuleLoadData", cuda_load),
        ENTRY("cuModuleGetFunction", cuda_function),
        ENTRY("cuFuncSetAttribute", cuda_set_attribute),
        ENTRY("cuTensorMapEncodeTiled", cuda_encode),
        ENTRY("cuLaunchKernel", cuda_launch),
        ENTRY("cuLaunchKernelEx", cuda_launch_ex),
        ENTRY("cuGetErrorName", cuda_error_name),
        ENTRY("cuGetErrorString", cuda_error_text),
    };
    (void)library;
    note("dlsym", "%s", name);
    snprintf(loader_error, sizeof loader_error, "undefined symbol: %s", name);
    if (strcmp(name, missing) == 0)
        return nullptr;
    void (*address)(void) = (void (*)(void))forbidden;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0)
            address = table[i].address;
    void *found;
    memcpy(&found, &address, sizeof found);
    return found;
}

char *fake_dlerror(void) { return loader_error; }
