// CPU backend: detection of the instruction-set level, the thread pool's task loop, checks of group offsets, and
// zero_padding. The GEMMs and the quantizer are gemm.c and quantize.c. Compiled once per level, like them.
#include <fenv.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"

#define MX_STRING_(text) #text
#define MX_STRING(text) MX_STRING_(text)

#if defined(__AVX2__)
#include <cpuid.h>

// The bits of XCR0 that say which vector registers the operating system saves.
static uint32_t saved_registers(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#endif

// What the compiler was told it may use must be there: the level's flags are in build.cfg.
static bool has_level(void) {
#if defined(__AVX2__)
    enum { YMM = 0x06, ZMM = 0xe6 };
    uint32_t a, b, c, d, b7, c7, d7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7))
        return false;
    bool found = (c & bit_FMA) && (c & bit_F16C) && (b7 & bit_AVX2) && (saved_registers() & YMM) == YMM;
#if defined(__AVX512F__)
    uint32_t wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    found = found && (b7 & wanted) == wanted && (saved_registers() & ZMM) == ZMM;
#endif
    return found;
#else
    return true;
#endif
}

// Asked once: in a virtual machine each cpuid costs microseconds.
static int available(int32_t, struct mx_error *why_not) {
    enum { UNKNOWN, YES, NO };
    static _Atomic int answer = UNKNOWN;
    if (answer == UNKNOWN)
        answer = has_level() ? YES : NO;
    return answer == YES ? 0 : mx_fail(why_not, "the processor or the system lacks " MX_STRING(MX_LEVEL));
}

struct job {
    _Atomic int64_t next;
    int64_t count;
    void (*task)(int64_t index, int thread, void *context);
    void *context;
};

static void drain(int64_t begin, int64_t end, void *context) {
    struct job *job = context;
    fenv_t caller;
    fegetenv(&caller);
    fesetenv(FE_DFL_ENV);
    for (int64_t thread = begin; thread < end; thread++)
        for (int64_t index; (index = atomic_fetch_add(&job->next, 1)) < job->count;)
            job->task(index, (int)thread, job->context);
    fesetenv(&caller);
}

int mx_cpu_run(int64_t count, void (*task)(int64_t index, int thread, void *context), void *context,
               const struct mx_exec *exec, struct mx_error *error) {
    if (count == 0)
        return 0;
    struct job job = {.count = count, .task = task, .context = context};
    int64_t threads = exec->threads < count ? exec->threads : count;
    if (exec->parallel_for(threads, drain, &job))
        return mx_fail(error, "torch's thread pool refused the work");
    return 0;
}

int mx_cpu_check_offs(const int32_t *offs, int64_t groups, int64_t limit, int64_t multiple, struct mx_error *error) {
    for (int64_t g = 0; g < groups; g++) {
        int32_t start = g ? offs[g - 1] : 0;
        if (offs[g] < start)
            return mx_fail(
                error, "offs must be cumulative group ends that never decrease from 0, got offs[%lld] = %d after %d",
                (long long)g, offs[g], start);
        if (offs[g] > limit)
            return mx_fail(error, "offs must not exceed the number of tokens, %lld, got offs[%lld] = %d",
                           (long long)limit, (long long)g, offs[g]);
        if (offs[g] % multiple)
            return mx_fail(error, "offs must be multiples of %lld in the plain layout, got offs[%lld] = %d",
                           (long long)multiple, (long long)g, offs[g]);
    }
    return 0;
}

static void clear_row(int64_t row, int thread, void *context) {
    (void)thread;
    const struct mx_padding_args *args = context;
    int64_t used = args->groups ? args->offs[args->groups - 1] : 0;
    if (used == args->depth)
        return; // of an operand without tokens there is not even an address
    memset(args->data + row * args->depth + used, 0, (size_t)(args->depth - used));
    memset(args->scale + (row * args->depth + used) / MX_BLOCK, 0, (size_t)((args->depth - used) / MX_BLOCK));
}

static int zero_padding(const struct mx_padding_args *args, const struct mx_exec *exec, struct mx_error *error) {
    if (mx_cpu_check_offs(args->offs, args->groups, args->depth, MX_BLOCK, error))
        return 1;
    struct mx_padding_args copy = *args;
    return mx_cpu_run(args->rows, clear_row, &copy, exec, error);
}

const struct mx_backend MX_LEVELED(mx_cpu) = {
    .name = "cpu-" MX_STRING(MX_LEVEL),
    .place = MX_ON_HOST,
    .alignment = 1,
    .available = available,
    .quantize = mx_cpu_quantize,
    .gemm_rows = mx_cpu_gemm_rows,
    .gemm_depth = mx_cpu_gemm_depth,
    .zero_padding = zero_padding,
    .quantize_workspace = mx_cpu_quantize_workspace,
    .gemm_rows_workspace = mx_cpu_gemm_rows_workspace,
    .gemm_depth_workspace = mx_cpu_gemm_depth_workspace,
};
