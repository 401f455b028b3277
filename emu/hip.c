/* libamdhip64's C API over the emulator: the calls that a launcher resolves with dlsym, plus emu_* controls for tests.
 * Values, structures and behaviour: HIP's public headers and its reference. One device, gfx950. One lock around every
 * call.
 *
 * Work goes through one list: a stream that captures appends to its graph; otherwise the work runs at the call, or with
 * MXFP8_EMU_DEFER=1 when something waits for it (the latest moment the API allows). A kernel that stops leaves its text
 * in emu_last_error() and, as after a GPU fault, every later call fails until emu_clear_error(). */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "machine.h"
#include "memory.h"

#define API __attribute__((visibility("default")))

#define HIP_ERRORS(X)                                                                                                  \
    X(OK, 0, "hipSuccess", "no error")                                                                                 \
    X(INVALID_VALUE, 1, "hipErrorInvalidValue", "invalid argument")                                                    \
    X(OUT_OF_MEMORY, 2, "hipErrorOutOfMemory", "out of memory")                                                        \
    X(INVALID_DEVICE, 101, "hipErrorInvalidDevice", "invalid device ordinal")                                          \
    X(INVALID_IMAGE, 200, "hipErrorInvalidImage", "device kernel image is invalid")                                    \
    X(NO_BINARY_FOR_GPU, 209, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device")    \
    X(INVALID_HANDLE, 400, "hipErrorInvalidHandle", "invalid resource handle")                                         \
    X(ILLEGAL_STATE, 401, "hipErrorIllegalState", "the operation cannot be performed in the present state")            \
    X(NOT_FOUND, 500, "hipErrorNotFound", "named symbol not found")                                                    \
    X(ILLEGAL_ADDRESS, 700, "hipErrorIllegalAddress", "an illegal memory access was encountered")                      \
    X(LAUNCH_OUT_OF_RESOURCES, 701, "hipErrorLaunchOutOfResources", "out of resources")                                \
    X(HOST_ALREADY_REGISTERED, 712, "hipErrorHostMemoryAlreadyRegistered",                                             \
      "part or all of the requested memory range is already mapped")                                                   \
    X(LAUNCH_FAILURE, 719, "hipErrorLaunchFailure", "unspecified launch failure")                                      \
    X(NOT_SUPPORTED, 801, "hipErrorNotSupported", "operation not supported")                                           \
    X(CAPTURE_UNSUPPORTED, 900, "hipErrorStreamCaptureUnsupported",                                                    \
      "operation not permitted when stream is capturing")                                                              \
    X(CAPTURE_INVALIDATED, 901, "hipErrorStreamCaptureInvalidated",                                                    \
      "operation failed due to a previous error during capture")                                                       \
    X(CAPTURE_IMPLICIT, 906, "hipErrorStreamCaptureImplicit",                                                          \
      "operation would make the legacy stream depend on a capturing blocking stream")                                  \
    X(UNKNOWN, 999, "hipErrorUnknown", "unknown error")

#define X(name, code, full, text) HIP_##name = (code),
enum hip_error { HIP_ERRORS(X) };
#undef X
static const struct {
    int code;
    const char *name, *text;
} errors[] = {
#define X(name, code, full, text) {code, full, text},
    HIP_ERRORS(X)
#undef X
};

/* ---- state ---- */
enum op_kind { OP_LAUNCH, OP_COPY, OP_FILL };
struct op {
    struct op *next;
    enum op_kind kind;
    const struct emu_kernel *k;
    uint32_t grid[3], block[3], lds;
    uint8_t *kernarg; /* 64-byte aligned, registered as read-only while the kernel runs */
    void *dst;
    const void *src;
    size_t bytes;
    int value;
};
struct op_list {
    struct op *first, **tail;
};
struct graph {
    struct op_list ops;
    unsigned refs;
};
struct stream {
    struct graph *capture;
    int status; /* 0 none, 1 active, 2 invalidated */
    bool relaxed;
};
struct allocation {
    struct allocation *next;
    uint64_t base, bytes;
    void *raw; /* null: the host's own, registered */
};

static pthread_mutex_t big_lock = PTHREAD_MUTEX_INITIALIZER;
static const struct emu_options defaults = {
    .strict = true, .races = true, .conflict_stop = true, .threads = 2, .blocks_per_thread = 2};
static struct emu_options options = defaults;
static bool options_read;
static struct emu_error fault; /* of the kernel that stopped, or the last refused call */
static int sticky;
static _Thread_local int last_error;
static struct op_list deferred;
static struct stream null_stream;
static unsigned strict_captures;
static struct allocation *allocations;
static uint64_t counters[CNT_COUNT], *op_counts, junk_state = 1;

/* ---- options ---- */
/* one line per option: MXFP8_EMU_<name> in the environment, name in emu_set_option */
static const struct option {
    const char *name;
    uint64_t *number; /* any of these three */
    bool *flag;
    int *choice;
    const char *words[4]; /* of a choice, in the order of its enum */
} option_table[] = {
    {.name = "SEED", .number = &options.seed},
    {.name = "STRICT", .flag = &options.strict},
    {.name = "RACES", .flag = &options.races},
    {.name = "OOB", .choice = (int *)&options.oob, .words = {"stop", "zero"}},
    {.name = "FILL", .choice = (int *)&options.fill, .words = {"zero", "keep"}},
    {.name = "RANGE", .choice = (int *)&options.range, .words = {"rj", "isa"}},
    {.name = "SADDR", .choice = (int *)&options.saddr, .words = {"zext", "sext"}},
    {.name = "FP8_EDGE", .choice = (int *)&options.edge, .words = {"round", "overflow"}},
    {.name = "SCALE255", .choice = (int *)&options.scale255, .words = {"apply", "keep"}},
    {.name = "PERMLANE", .choice = (int *)&options.permlane, .words = {"all", "exec"}},
    {.name = "CONFLICT_STOP", .flag = &options.conflict_stop},
    {.name = "SUM", .choice = (int *)&options.sum, .words = {"wide", "rj"}},
    {.name = "LANDING", .choice = (int *)&options.landing, .words = {"seed", "early", "late"}},
    {.name = "THREADS", .number = &options.threads},
    {.name = "BLOCKS", .number = &options.blocks_per_thread},
    {.name = "DEFER", .flag = &options.defer},
    {.name = "MAX_INSTS", .number = &options.max_insts},
};
enum { OPTIONS = sizeof option_table / sizeof *option_table };

static bool apply_option(const struct option *o, const char *value) {
    char *end = nullptr;
    uint64_t number = strtoull(value, &end, 0);
    bool is_number = *value && !*end;
    for (int k = 0; o->choice && k < 4 && o->words[k]; k++)
        if (strcmp(value, o->words[k]) == 0) {
            *o->choice = k;
            return true;
        }
    if (o->number && is_number)
        *o->number = number;
    if (o->flag && is_number)
        *o->flag = number != 0;
    return !o->choice && is_number;
}

static bool set_option(const char *name, const char *value) {
    for (size_t n = 0; n < OPTIONS; n++)
        if (strcmp(name, option_table[n].name) == 0)
            return apply_option(&option_table[n], value);
    return false;
}

static void read_environment(void) {
    options_read = true;
    for (size_t n = 0; n < OPTIONS; n++) {
        char name[48];
        snprintf(name, sizeof name, "MXFP8_EMU_%s", option_table[n].name);
        const char *value = getenv(name);
        if (value && !apply_option(&option_table[n], value))
            emu_fail(&fault, EMU_BAD_VALUE, "%s=%s is not understood", name, value);
    }
}

/* every call: lock, options, and the sticky error of a stopped kernel */
static bool enter(int *out) {
    pthread_mutex_lock(&big_lock);
    if (!options_read)
        read_environment();
    *out = sticky;
    return !sticky;
}

static int leave(int code) {
    if (code)
        last_error = code;
    pthread_mutex_unlock(&big_lock);
    return code;
}

static int refuse(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int refuse(int code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fault.code = EMU_BAD_VALUE;
    vsnprintf(fault.text, sizeof fault.text, fmt, args);
    va_end(args);
    return code;
}

/* ---- work ---- */
static void append(struct op_list *l, struct op *o) {
    if (!l->first)
        l->tail = &l->first;
    *l->tail = o;
    l->tail = &o->next;
    o->next = nullptr;
}

static void free_op(struct op *o) {
    free(o->kernarg);
    free(o);
}

static void free_ops(struct op_list *l) {
    while (l->first) {
        struct op *o = l->first;
        l->first = o->next;
        free_op(o);
    }
}

static size_t kernarg_room(const struct emu_kernel *k) { return ((size_t)k->kernarg_size + 127) & ~(size_t)63; }

/* adds a launch's numbers to the totals, the kernel's own included */
static void count_launch(const struct emu_launch *l) {
    const struct emu_op *table;
    emu_op_table(&table);
    for (unsigned n = 0; n < CNT_COUNT; n++)
        counters[n] += l->counters[n];
    for (uint32_t n = 0; n < l->k->ninsts; n++) {
        const struct emu_stat *s = &l->stats[n];
        if (l->k->insts[n].op)
            op_counts[l->k->insts[n].op - table] += s->hits;
        emu_add_stat(&l->k->stats[n], s);
    }
}

static void run_launch(const struct op *o) {
    const struct emu_op *table;
    if (!op_counts)
        op_counts = calloc(emu_op_table(&table), sizeof *op_counts);
    struct emu_launch l = {.k = o->k, .opt = options, .dyn_lds = o->lds, .kernarg = o->kernarg};
    memcpy(l.grid, o->grid, sizeof l.grid);
    memcpy(l.block, o->block, sizeof l.block);
    l.stats = calloc(o->k->ninsts + 1, sizeof *l.stats);
    if (!op_counts || !l.stats) {
        free(l.stats);
        sticky = refuse(HIP_OUT_OF_MEMORY, "out of memory for counters");
        return;
    }
    emu_mem_add((uint64_t)o->kernarg, kernarg_room(o->k), false);
    if (!emu_run(&l)) {
        fault = l.error;
        sticky = l.error.code == EMU_MEMORY_FAULT ? HIP_ILLEGAL_ADDRESS : HIP_LAUNCH_FAILURE;
    }
    emu_mem_remove((uint64_t)o->kernarg);
    count_launch(&l);
    free(l.stats);
}

static void run_op(const struct op *o) {
    if (sticky)
        return;
    switch (o->kind) {
    case OP_LAUNCH:
        run_launch(o);
        break;
    case OP_COPY:
        memmove(o->dst, o->src, o->bytes);
        break;
    case OP_FILL:
        memset(o->dst, o->value, o->bytes);
        break;
    }
}

static void flush(void) {
    while (deferred.first) {
        struct op *o = deferred.first;
        deferred.first = o->next;
        run_op(o);
        free_op(o);
    }
}

static struct stream *stream_of(void *handle) { return handle ? handle : &null_stream; }

static int submit(void *handle, struct op *o) {
    struct stream *s = stream_of(handle);
    if (s->status == 2) {
        free_op(o);
        return HIP_CAPTURE_INVALIDATED;
    }
    if (s->status == 1) {
        append(&s->capture->ops, o);
        return HIP_OK;
    }
    append(&deferred, o);
    if (!options.defer)
        flush();
    return HIP_OK;
}

/* for a call that waits, allocates or frees: refused with `code` while a stream captures, unless in relaxed mode */
static bool enter_outside_capture(int *out, int code) {
    if (!enter(out))
        return false;
    if (strict_captures)
        *out = refuse(code, "call not allowed while a stream is capturing");
    return !*out;
}

static struct op *new_op(enum op_kind kind) {
    struct op *o = calloc(1, sizeof *o);
    if (o)
        o->kind = kind;
    return o;
}

/* ---- memory ---- */
static struct allocation *find_allocation(uint64_t addr) {
    for (struct allocation *a = allocations; a; a = a->next)
        if (addr >= a->base && addr < a->base + a->bytes)
            return a;
    return nullptr;
}

static bool inside(const void *p, size_t bytes) {
    uint64_t lo, hi, addr = (uint64_t)p;
    bool writable;
    emu_mem_rdlock();
    bool found = !bytes || (emu_mem_find(addr, &lo, &hi, &writable) && addr + bytes <= hi);
    emu_mem_unlock();
    return found;
}

static int allocate(void **out, size_t bytes) {
    enum { GUARD = 256 };
    if (!out)
        return HIP_INVALID_VALUE;
    *out = nullptr;
    if (!bytes)
        return HIP_OK;
    struct allocation *a = calloc(1, sizeof *a);
    size_t room = (bytes + (size_t)3 * GUARD) & ~(size_t)(GUARD - 1);
    void *raw = a ? aligned_alloc(GUARD, room) : nullptr;
    if (!raw) {
        free(a);
        return refuse(HIP_OUT_OF_MEMORY, "hipMalloc of %zu bytes", bytes);
    }
    emu_junk(raw, room, options.seed ^ junk_state++ << 32);
    *a = (struct allocation){allocations, (uint64_t)raw + GUARD, bytes, raw};
    allocations = a;
    emu_mem_add(a->base, bytes, true);
    *out = (void *)a->base;
    return HIP_OK;
}

/* Freed memory stays out of malloc's hands for a while, so that a stale pointer meets no new allocation. */
static void quarantine(void *raw, uint64_t bytes) {
    enum { SLOTS = 256 };
    static const uint64_t most = 64u << 20;
    static struct {
        void *raw;
        uint64_t bytes;
    } held[SLOTS];
    static unsigned first, n;
    static uint64_t total;
    while (n && (n == SLOTS || total + bytes > most)) {
        free(held[first].raw);
        total -= held[first].bytes;
        first = (first + 1) % SLOTS;
        n--;
    }
    held[(first + n) % SLOTS].raw = raw;
    held[(first + n++) % SLOTS].bytes = bytes;
    total += bytes;
}

/* takes the allocation that begins at p, made by hipMalloc or registered, out of the list; null if there is none */
static struct allocation *take_allocation(const void *p, bool registered) {
    for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
        struct allocation *a = *link;
        if (a->base != (uint64_t)p || registered == (a->raw != nullptr))
            continue;
        emu_mem_remove(a->base);
        *link = a->next;
        return a;
    }
    return nullptr;
}

API int hipMalloc(void **out, size_t bytes) {
    int code;
    if (enter_outside_capture(&code, HIP_CAPTURE_UNSUPPORTED))
        code = allocate(out, bytes);
    return leave(code);
}

API int hipFree(void *p) {
    int code;
    if (!enter_outside_capture(&code, HIP_CAPTURE_UNSUPPORTED))
        return leave(code);
    flush();
    struct allocation *a = take_allocation(p, false);
    if (a)
        quarantine(a->raw, a->bytes);
    free(a);
    return leave(a || !p ? HIP_OK : refuse(HIP_INVALID_VALUE, "free of %p, which is not an allocation", p));
}

/* makes host memory (a CPU tensor's storage) visible to kernels, as device pointer = host pointer; with
 * hipHostRegisterReadOnly a kernel that stores into it stops */
API int hipHostRegister(void *p, size_t bytes, unsigned flags) {
    enum { READ_ONLY = 8 };
    int code;
    if (!enter(&code))
        return leave(code);
    struct allocation *a = p && bytes ? calloc(1, sizeof *a) : nullptr;
    if (!a)
        return leave(HIP_INVALID_VALUE);
    if (!emu_mem_add((uint64_t)p, bytes, !(flags & READ_ONLY))) {
        free(a);
        return leave(refuse(HIP_HOST_ALREADY_REGISTERED, "%p + %zu overlaps registered memory", p, bytes));
    }
    *a = (struct allocation){allocations, (uint64_t)p, bytes, nullptr};
    allocations = a;
    return leave(HIP_OK);
}

API int hipHostUnregister(void *p) {
    int code;
    if (!enter(&code))
        return leave(code);
    flush();
    struct allocation *a = take_allocation(p, true);
    free(a);
    return leave(a ? HIP_OK : refuse(HIP_INVALID_VALUE, "%p is not registered", p));
}

static int copy(void *dst, const void *src, size_t bytes, int kind, void *stream) {
    if (kind < 0 || kind > 4 || (bytes && (!dst || !src)))
        return refuse(HIP_INVALID_VALUE, "hipMemcpy kind %d, dst %p, src %p", kind, dst, src);
    if ((kind == 1 || kind == 3) && !inside(dst, bytes))
        return refuse(HIP_INVALID_VALUE, "hipMemcpy: destination %p + %zu is not inside a device allocation", dst,
                      bytes);
    if ((kind == 2 || kind == 3) && !inside(src, bytes))
        return refuse(HIP_INVALID_VALUE, "hipMemcpy: source %p + %zu is not inside a device allocation", src, bytes);
    struct op *o = new_op(OP_COPY);
    if (!o)
        return HIP_OUT_OF_MEMORY;
    o->dst = dst;
    o->src = src;
    o->bytes = bytes;
    return submit(stream, o);
}

API int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream) {
    int code;
    if (enter(&code))
        code = copy(dst, src, bytes, kind, stream);
    return leave(code);
}

API int hipMemcpy(void *dst, const void *src, size_t bytes, int kind) {
    int code;
    if (enter_outside_capture(&code, HIP_CAPTURE_IMPLICIT)) {
        code = copy(dst, src, bytes, kind, nullptr);
        if (!code) {
            flush();
            code = sticky;
        }
    }
    return leave(code);
}

API int hipMemsetAsync(void *dst, int value, size_t bytes, void *stream) {
    int code;
    if (!enter(&code))
        return leave(code);
    if (!inside(dst, bytes))
        return leave(refuse(HIP_INVALID_VALUE, "hipMemset: %p + %zu is not inside a device allocation", dst, bytes));
    struct op *o = new_op(OP_FILL);
    if (!o)
        return leave(HIP_OUT_OF_MEMORY);
    o->dst = dst;
    o->bytes = bytes;
    o->value = value;
    return leave(submit(stream, o));
}

struct hip_pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int is_managed;
    unsigned flags;
};

API int hipPointerGetAttributes(struct hip_pointer_attributes *out, const void *p) {
    int code;
    if (!enter(&code))
        return leave(code);
    if (!out || !p)
        return leave(HIP_INVALID_VALUE);
    struct allocation *a = find_allocation((uint64_t)p);
    *out = (struct hip_pointer_attributes){.device = -2};
    if (a)
        *out = (struct hip_pointer_attributes){
            .type = a->raw ? 2 : 1, .device_pointer = (void *)p, .host_pointer = a->raw ? nullptr : (void *)p};
    return leave(HIP_OK);
}

/* ---- device ---- */
API int hipInit(unsigned flags) {
    int code;
    enter(&code);
    return leave(flags ? HIP_INVALID_VALUE : code);
}

API int hipGetDeviceCount(int *n) {
    if (!n)
        return HIP_INVALID_VALUE;
    *n = 1;
    return HIP_OK;
}

API int hipGetDevice(int *device) {
    if (!device)
        return HIP_INVALID_VALUE;
    *device = 0;
    return HIP_OK;
}

API int hipSetDevice(int device) { return device ? HIP_INVALID_DEVICE : HIP_OK; }

API int hipDeviceGetAttribute(int *out, int attribute, int device) {
    static const struct {
        int attribute, value;
    } table[] = {{56, 1024},           {63, 256},         {23, 9},           {61, 5},
                 {74, EMU_LDS_MAX},    {75, EMU_LDS_MAX}, {76, EMU_LDS_MAX}, {87, 64},
                 {10002, EMU_LDS_MAX}, {10015, 256},      {10017, 100000},   {10018, 8}};
    if (device)
        return HIP_INVALID_DEVICE;
    for (size_t n = 0; out && n < sizeof table / sizeof *table; n++)
        if (table[n].attribute == attribute) {
            *out = table[n].value;
            return HIP_OK;
        }
    return HIP_INVALID_VALUE;
}

API int hipGetDevicePropertiesR0600(void *prop, int device) {
    enum { BYTES = 1472, MEM = 288, LDS = 296, WARP = 308, MAX_THREADS = 320, MAJOR = 360, MINOR = 364, CUS = 388 };
    enum { LDS_PER_CU = 640, ARCH = 1160, MAX_LDS_PER_CU = 1416 };
    if (!prop || device)
        return prop ? HIP_INVALID_DEVICE : HIP_INVALID_VALUE;
    uint8_t *p = prop;
    const uint64_t memory = 288ull << 30, lds = EMU_LDS_MAX;
    const int warp = 64, major = 9, minor = 5, cus = 256, threads = 1024;
    memset(p, 0, BYTES);
    snprintf((char *)p, 256, "AMD Instinct MI355X (mxfp8_moe emulator)");
    memcpy(p + MEM, &memory, 8);
    memcpy(p + LDS, &lds, 8);
    memcpy(p + WARP, &warp, 4);
    memcpy(p + MAX_THREADS, &threads, 4);
    memcpy(p + MAJOR, &major, 4);
    memcpy(p + MINOR, &minor, 4);
    memcpy(p + CUS, &cus, 4);
    memcpy(p + LDS_PER_CU, &lds, 8);
    snprintf((char *)p + ARCH, 256, "gfx950:sramecc+:xnack-");
    memcpy(p + MAX_LDS_PER_CU, &lds, 8);
    return HIP_OK;
}

API int hipDeviceSynchronize(void) {
    int code;
    if (enter_outside_capture(&code, HIP_CAPTURE_UNSUPPORTED)) {
        flush();
        code = sticky;
    }
    return leave(code);
}

/* ---- errors ---- */
static size_t error_index(int code) {
    size_t n = 0;
    while (n + 1 < sizeof errors / sizeof *errors && errors[n].code != code)
        n++;
    return n;
}
API const char *hipGetErrorName(int code) { return errors[error_index(code)].name; }
API const char *hipGetErrorString(int code) { return errors[error_index(code)].text; }
API int hipGetLastError(void) {
    int code = last_error;
    last_error = HIP_OK;
    return code;
}

/* ---- streams and events ---- */
static int new_handle(void **out, size_t bytes) {
    int code;
    if (enter(&code)) {
        void *made = out ? calloc(1, bytes) : nullptr;
        code = made ? HIP_OK : HIP_INVALID_VALUE;
        if (made)
            *out = made;
    }
    return leave(code);
}

API int hipStreamCreate(void **out) { return new_handle(out, sizeof(struct stream)); }
API int hipStreamDestroy(void *stream) {
    int code;
    enter(&code);
    if (stream)
        flush();
    free(stream);
    return leave(stream ? code : HIP_INVALID_HANDLE);
}

static void invalidate(struct stream *s) { s->status = 2; }

API int hipStreamSynchronize(void *stream) {
    int code;
    if (enter(&code)) {
        struct stream *s = stream_of(stream);
        if (s->status) {
            invalidate(s);
            code = refuse(HIP_CAPTURE_UNSUPPORTED, "hipStreamSynchronize of a capturing stream");
        } else {
            flush();
            code = sticky;
        }
    }
    return leave(code);
}
API int hipStreamIsCapturing(void *stream, int *status) {
    int code;
    if (enter(&code)) {
        code = status ? HIP_OK : HIP_INVALID_VALUE;
        if (status)
            *status = stream_of(stream)->status;
    }
    return leave(code);
}
/* An event is a handle and no more: work is one list in the order of issue, so waiting for one is waiting for all. */
API int hipEventCreate(void **out) { return new_handle(out, 1); }
API int hipEventRecord(void *event, void *stream) {
    int code;
    if (enter(&code))
        code = !event ? HIP_INVALID_HANDLE : stream_of(stream)->status == 2 ? HIP_CAPTURE_INVALIDATED : HIP_OK;
    return leave(code);
}
API int hipEventSynchronize(void *event) {
    int code;
    if (enter(&code) && event) {
        flush();
        code = sticky;
    }
    return leave(event ? code : HIP_INVALID_HANDLE);
}

/* ---- graphs ---- */
API int hipStreamBeginCapture(void *stream, int mode) {
    int code;
    if (!enter(&code))
        return leave(code);
    struct stream *s = stream;
    if (!s || s->status)
        return leave(s ? HIP_ILLEGAL_STATE : HIP_CAPTURE_UNSUPPORTED);
    s->capture = calloc(1, sizeof *s->capture);
    if (!s->capture)
        return leave(HIP_OUT_OF_MEMORY);
    s->capture->refs = 1;
    s->status = 1;
    s->relaxed = mode == 2;
    strict_captures += !s->relaxed;
    return leave(HIP_OK);
}

static void drop_graph(struct graph *g) {
    if (g && !--g->refs) {
        free_ops(&g->ops);
        free(g);
    }
}

API int hipStreamEndCapture(void *stream, void **graph) {
    int code;
    if (!enter(&code))
        return leave(code);
    struct stream *s = stream;
    if (!s || !s->status || !graph)
        return leave(HIP_ILLEGAL_STATE);
    bool valid = s->status == 1;
    *graph = valid ? s->capture : nullptr;
    if (!valid)
        drop_graph(s->capture);
    s->capture = nullptr;
    s->status = 0;
    strict_captures -= !s->relaxed;
    return leave(valid ? HIP_OK : HIP_CAPTURE_INVALIDATED);
}

API int hipGraphInstantiate(void **exec, void *graph, void *node, char *log, size_t bytes) {
    int code;
    (void)node;
    (void)log;
    (void)bytes;
    if (!enter(&code))
        return leave(code);
    struct graph *g = graph;
    if (!exec || !g)
        return leave(HIP_INVALID_VALUE);
    g->refs++;
    *exec = g;
    return leave(HIP_OK);
}

static struct op *clone_op(const struct op *o) {
    struct op *copy_of = new_op(o->kind);
    if (!copy_of)
        return nullptr;
    *copy_of = *o;
    if (o->kernarg) {
        copy_of->kernarg = aligned_alloc(64, kernarg_room(o->k));
        if (!copy_of->kernarg) {
            free(copy_of);
            return nullptr;
        }
        memcpy(copy_of->kernarg, o->kernarg, kernarg_room(o->k));
    }
    return copy_of;
}

API int hipGraphLaunch(void *exec, void *stream) {
    int code;
    if (!enter(&code))
        return leave(code);
    struct graph *g = exec;
    code = g ? HIP_OK : HIP_INVALID_VALUE;
    for (const struct op *o = g ? g->ops.first : nullptr; o && !code; o = o->next) {
        struct op *again = clone_op(o);
        code = again ? submit(stream, again) : HIP_OUT_OF_MEMORY;
    }
    return leave(code);
}
API int hipGraphDestroy(void *graph) {
    int code;
    enter(&code);
    drop_graph(graph);
    return leave(code);
}
API int hipGraphExecDestroy(void *exec) { return hipGraphDestroy(exec); }

/* ---- modules and launches ---- */
API int hipModuleLoadData(void **out, const void *image) {
    int code;
    if (!enter(&code))
        return leave(code);
    if (!out || !image)
        return leave(HIP_INVALID_VALUE);
    struct emu_error e = {};
    *out = emu_module_load(image, &e);
    if (!*out)
        fault = e;
    return leave(*out ? HIP_OK : e.code == EMU_OTHER_GPU ? HIP_NO_BINARY_FOR_GPU : HIP_INVALID_IMAGE);
}

API int hipModuleUnload(void *module) {
    int code;
    if (enter_outside_capture(&code, HIP_CAPTURE_UNSUPPORTED)) {
        flush();
        emu_module_free(module);
    }
    return leave(code);
}

API int hipModuleGetFunction(void **out, void *module, const char *name) {
    int code;
    if (!enter(&code))
        return leave(code);
    struct emu_module *m = module;
    if (!out || !m || !name)
        return leave(HIP_INVALID_VALUE);
    *out = nullptr;
    for (unsigned n = 0; n < m->nkernels; n++)
        if (!strcmp(m->kernels[n].name, name))
            *out = &m->kernels[n];
    return leave(*out ? HIP_OK : refuse(HIP_NOT_FOUND, "no kernel %s in the module", name));
}

static uint64_t hidden_value(const struct op *o, const char *kind) {
    static const char *const axis = "xyz";
    size_t n = strlen(kind);
    const char *at = n ? strchr(axis, kind[n - 1]) : nullptr;
    unsigned d = at ? (unsigned)(at - axis) : 0;
    if (!strncmp(kind, "hidden_block_count_", 19))
        return o->grid[d];
    if (!strncmp(kind, "hidden_group_size_", 18))
        return o->block[d];
    if (!strcmp(kind, "hidden_grid_dims"))
        return o->grid[2] * o->block[2] > 1 ? 3 : o->grid[1] * o->block[1] > 1 ? 2 : 1;
    if (!strcmp(kind, "hidden_dynamic_lds_size"))
        return o->lds;
    return 0; /* remainders and global offsets are 0: the API takes whole blocks */
}

static bool is_hidden(const struct emu_arg *a) { return !strncmp(a->kind, "hidden_", 7); }

static size_t explicit_bytes(const struct emu_kernel *k) {
    size_t top = 0;
    for (unsigned n = 0; n < k->nargs; n++)
        if (!is_hidden(&k->args[n]) && k->args[n].offset + k->args[n].size > top)
            top = k->args[n].offset + k->args[n].size;
    return top;
}

/* explicit arguments from kernelParams or from the extra buffer; hidden ones are the runtime's to fill */
static int fill_kernarg(struct op *o, void **params, void **extra) {
    const struct emu_kernel *k = o->k;
    size_t want = explicit_bytes(k), given = 0;
    const void *buffer = nullptr;
    for (unsigned n = 0; extra && extra[n] != (void *)3; n += 2)
        if (extra[n] == (void *)1)
            buffer = extra[n + 1];
        else if (extra[n] == (void *)2)
            given = *(const size_t *)extra[n + 1];
        else
            return refuse(HIP_INVALID_VALUE, "%s: unknown key in extra", k->name);
    if (extra && want && (!buffer || given < want || given > k->kernarg_size))
        return refuse(HIP_INVALID_VALUE, "%s: %zu bytes of arguments, the kernel takes %zu", k->name, given, want);
    if (extra && !want && given)
        return refuse(HIP_LAUNCH_OUT_OF_RESOURCES, "%s takes no arguments", k->name);
    if (!extra && !params && want)
        return refuse(HIP_INVALID_VALUE, "%s: no arguments given", k->name);
    if (buffer)
        memcpy(o->kernarg, buffer, given);
    for (unsigned n = 0; n < k->nargs; n++) {
        const struct emu_arg *a = &k->args[n];
        uint64_t value = hidden_value(o, a->kind);
        if (is_hidden(a))
            memcpy(o->kernarg + a->offset, &value, a->size < 8 ? a->size : 8);
        else if (params)
            memcpy(o->kernarg + a->offset, params[n], a->size);
    }
    return HIP_OK;
}

static int check_shape(const struct op *o) {
    uint64_t threads = (uint64_t)o->block[0] * o->block[1] * o->block[2];
    if (o->k->refusal[0])
        return refuse(HIP_NOT_SUPPORTED, "%s: %s", o->k->name, o->k->refusal);
    for (unsigned d = 0; d < 3; d++)
        if (!o->grid[d] || !o->block[d] || o->grid[d] > (d ? 65535u : 0x7fffffffu))
            return refuse(HIP_INVALID_VALUE, "%s: grid %u x %u x %u of blocks %u x %u x %u", o->k->name, o->grid[0],
                          o->grid[1], o->grid[2], o->block[0], o->block[1], o->block[2]);
    if (threads > 1024 || (o->k->max_flat_wg && threads > o->k->max_flat_wg))
        return refuse(HIP_LAUNCH_FAILURE, "%s: %llu threads a block, the kernel was built for %u", o->k->name,
                      (unsigned long long)threads, o->k->max_flat_wg);
    /* a workgroup runs on one CU: 4 SIMDs of 512 registers a lane, at most 8 waves each */
    uint64_t per_simd = EMU_VGPRS / o->k->env.vgprs, waves = (threads + EMU_LANES - 1) / EMU_LANES;
    if (waves > 4 * (per_simd < 8 ? per_simd : 8))
        return refuse(HIP_LAUNCH_OUT_OF_RESOURCES, "%s: %llu waves of %u registers do not fit a CU", o->k->name,
                      (unsigned long long)waves, o->k->env.vgprs);
    if (o->lds + (uint64_t)o->k->group_segment > EMU_LDS_MAX)
        return refuse(HIP_INVALID_VALUE, "%s: %u + %u bytes of LDS, the limit is %u", o->k->name, o->k->group_segment,
                      o->lds, EMU_LDS_MAX);
    return HIP_OK;
}

API int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned lds, void *stream, void **params, void **extra) {
    int code;
    if (!enter(&code))
        return leave(code);
    if (!function || (params && extra))
        return leave(function ? HIP_INVALID_VALUE : HIP_INVALID_HANDLE);
    struct op *o = new_op(OP_LAUNCH);
    if (!o)
        return leave(HIP_OUT_OF_MEMORY);
    o->k = function;
    o->lds = lds;
    memcpy(o->grid, (const uint32_t[3]){gx, gy, gz}, sizeof o->grid);
    memcpy(o->block, (const uint32_t[3]){bx, by, bz}, sizeof o->block);
    o->kernarg = aligned_alloc(64, kernarg_room(o->k));
    if (o->kernarg)
        memset(o->kernarg, 0xa5, kernarg_room(o->k)); /* padding and unset bytes are junk to the kernel */
    code = !o->kernarg ? HIP_OUT_OF_MEMORY : check_shape(o);
    if (!code)
        code = fill_kernarg(o, params, extra);
    if (code)
        free_op(o);
    else
        code = submit(stream, o);
    return leave(code);
}

/* ---- controls for tests ---- */
API const char *emu_last_error(void) { return fault.text; }
API void emu_clear_error(void) {
    pthread_mutex_lock(&big_lock);
    fault = (struct emu_error){};
    sticky = last_error = HIP_OK;
    pthread_mutex_unlock(&big_lock);
}
/* back to the default options, whatever the environment says */
API void emu_reset_options(void) {
    pthread_mutex_lock(&big_lock);
    options = defaults;
    options_read = true;
    pthread_mutex_unlock(&big_lock);
}
/* name as in the environment without MXFP8_EMU_; 0, or -1 when name or value is not known */
API int emu_set_option(const char *name, const char *value) {
    pthread_mutex_lock(&big_lock);
    if (!options_read)
        read_environment();
    bool ok = set_option(name, value);
    pthread_mutex_unlock(&big_lock);
    return ok ? 0 : -1;
}

#define X(name) #name,
static const char *const counter_names[] = {EMU_COUNTERS(X)};
#undef X

/* value of a counter by name, or the executed count of an instruction by its table name; UINT64_MAX: no such name */
API uint64_t emu_counter(const char *name) {
    for (unsigned n = 0; n < CNT_COUNT; n++)
        if (!strcasecmp(name, counter_names[n]))
            return counters[n];
    const struct emu_op *table;
    size_t nops = emu_op_table(&table);
    for (size_t n = 0; n < nops; n++)
        if (!strcmp(name, table[n].name))
            return op_counts ? op_counts[n] : 0;
    return UINT64_MAX;
}
API void emu_reset_counters(void) {
    const struct emu_op *table;
    size_t nops = emu_op_table(&table);
    memset(counters, 0, sizeof counters);
    if (op_counts)
        memset(op_counts, 0, nops * sizeof *op_counts);
}
/* text of one instruction with the widest register limits; bytes it takes, 0 when it does not decode (text says why) */
API int emu_disassemble(const uint32_t *words, int n, char *text, size_t room) {
    const struct emu_decode_env env = {.accum_offset = 256, .vgprs = 512, .sgprs = 102};
    struct emu_inst i;
    if (!emu_decode(words, (size_t)n, &env, &i)) {
        snprintf(text, room, "%s", i.fault);
        return 0;
    }
    emu_disasm(&i, text, room);
    return 4 * i.nwords;
}
/* Instruction n of a kernel: its text, and in `out` its offset from the entry, how often it ran since its module was
 * loaded, and for s_waitcnt how many vector-memory and other accesses it waited for. Bytes, 0 past the end, -1 when
 * undecodable. */
API int emu_kernel_inst(void *function, unsigned n, char *text, size_t room, uint64_t out[4]) {
    const struct emu_kernel *k = function;
    if (n >= k->ninsts)
        return 0;
    const struct emu_inst *i = &k->insts[n];
    const struct emu_stat *stat = &k->stats[n];
    memcpy(out, (const uint64_t[4]){i->pc, stat->hits, stat->vm, stat->lgkm}, 4 * sizeof *out);
    if (i->fault[0])
        snprintf(text, room, "%s", i->fault);
    else
        emu_disasm(i, text, room);
    return i->fault[0] ? -1 : 4 * i->nwords;
}
API int emu_inst_name(unsigned n, char *text, size_t room, int *enc, int *opcode) {
    const struct emu_op *table;
    if (n >= emu_op_table(&table))
        return 0;
    snprintf(text, room, "%s", table[n].name);
    *enc = table[n].enc;
    *opcode = table[n].opcode;
    return 1;
}
