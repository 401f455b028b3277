// Stands in for the dynamic loader and for libamdhip64 under csrc/gpu.c, which is compiled with dlopen, dlsym and
// dlerror renamed to the functions here (tests/test_launcher.py). Every call is a line of a log; any can be told to
// fail; devices are as many, and of such an architecture, as the test says. No GPU is involved: a launch is only its
// line.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../csrc/mxfp8.h"
#include "../kernels/gfx950.h"

#define EXPORT [[gnu::visibility("default")]]

int mx_fail(struct mx_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return 1;
}

EXPORT const struct mx_backend *fake_backend(int emulator) { return emulator ? &mx_gfx950_emulator : &mx_gfx950; }

// --------------------------------------------------------------------------------------- what the test says and reads

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 20];
static size_t log_used;
static char failing[64], missing[64], architecture[64] = "gfx950:sramecc+:xnack-";
static int fails_in, fail_code, devices = 1, library_absent;
static _Thread_local int current;

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
EXPORT void fake_set_current(int device) { current = device; }
EXPORT int fake_current(void) { return current; }
EXPORT const char *fake_log(void) { return log_text; }
EXPORT void fake_clear(void) { log_text[log_used = 0] = 0; }

// Notes a call. The code that it is to fail with, or 0.
[[gnu::format(printf, 2, 3)]] static int note(const char *function, const char *format, ...) {
    char detail[256];
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

// ---------------------------------------------------------------------------------------------------------------- HIP

struct function {
    int device;
    char name[96];
};

static int init(unsigned flags) { return note("hipInit", "%u", flags); }

static int get_device(int *device) {
    *device = current;
    return note("hipGetDevice", "-> %d", current);
}

static int set_device(int device) {
    int code = note("hipSetDevice", "%d", device);
    if (!code && (device < 0 || device >= devices))
        code = 101;
    if (!code)
        current = device;
    return code;
}

static int properties(void *to, int device) {
    int code = note("hipGetDevicePropertiesR0600", "%d", device);
    if (code || device >= devices)
        return code ? code : 101;
    memset(to, 0x5a, 1472); // the size of hipDeviceProp_tR0600; gcnArchName is at 1160
    snprintf((char *)to + 1160, 256, "%s", architecture);
    return 0;
}

// A module is its image's first bytes and the device that was current. Slow, so that a second loader would be seen.
static int load(void **module, const void *image) {
    usleep(2000);
    struct function *made = calloc(1, sizeof *made);
    made->device = current;
    snprintf(made->name, sizeof made->name, "%.16s", (const char *)image);
    *module = made;
    return note("hipModuleLoadData", "%s on %d", made->name, current);
}

static int get_function(void **function, void *module, const char *name) {
    struct function *made = calloc(1, sizeof *made);
    const struct function *from = module;
    made->device = from->device;
    snprintf(made->name, sizeof made->name, "%s", name);
    *function = made;
    return note("hipModuleGetFunction", "%s of %s on %d", name, from->name, from->device);
}

// The GEMMs' kernels get a plan as their second argument; the others' grids are not planned.
static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **parameters, void **extra) {
    const struct function *of = function;
    if (!parameters || extra || shared)
        return 1;
    const struct mx_gfx950_plan none = {}, *plan = &none;
    if (strstr(of->name, "prepare") || strstr(of->name, "gemm"))
        plan = parameters[1];
    return note("hipModuleLaunchKernel", "%s of %d on %d grid %u %u %u block %u %u %u stream %llu plan %d %d", of->name,
                of->device, current, gx, gy, gz, bx, by, bz, (unsigned long long)(uintptr_t)stream,
                plan->prepare_blocks, plan->blocks);
}

static const char *error_name(int code) { return code == 101 ? "hipErrorInvalidDevice" : "hipErrorTest"; }
static const char *error_text(int code) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "text of %d", code);
    return text;
}

// Of the emulator alone; and what no driver may be asked for.
static int host_register(const void *data, size_t bytes, unsigned flags) {
    return note("hipHostRegister", "%llu %zu %u", (unsigned long long)(uintptr_t)data, bytes, flags);
}
static int host_unregister(const void *data) {
    return note("hipHostUnregister", "%llu", (unsigned long long)(uintptr_t)data);
}
static int synchronize(void) { return note("hipDeviceSynchronize", ""); }
static const char *last_error(void) { return "what the emulator says"; }
static void clear_error(void) { note("emu_clear_error", ""); }
static int forbidden(void) { return note("forbidden", ""); }

// ------------------------------------------------------------------------------------------------- the dynamic loader

static _Thread_local char loader_error[128];

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
        ENTRY("hipInit", init),
        ENTRY("hipGetDevice", get_device),
        ENTRY("hipSetDevice", set_device),
        ENTRY("hipGetDevicePropertiesR0600", properties),
        ENTRY("hipModuleLoadData", load),
        ENTRY("hipModuleGetFunction", get_function),
        ENTRY("hipModuleLaunchKernel", launch),
        ENTRY("hipGetErrorName", error_name),
        ENTRY("hipGetErrorString", error_text),
        ENTRY("hipHostRegister", host_register),
        ENTRY("hipHostUnregister", host_unregister),
        ENTRY("hipDeviceSynchronize", synchronize),
        ENTRY("emu_last_error", last_error),
        ENTRY("emu_clear_error", clear_error),
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
