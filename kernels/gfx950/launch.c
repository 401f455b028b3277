// gfx950 (MI355X) behind the HIP runtime: which kernels an op launches, with which grids. And the same code objects on
// the emulator, which takes tensors of the CPU.
#include "../../csrc/gpu.h"
#include "plan.h"
#include "probe.h"

enum image { GEMM, PREPARE, QUANTIZE, PROBE };

alignas(4096) static const unsigned char gemm_image[] = {
#embed "gfx950/gemm.hsaco"
};
alignas(4096) static const unsigned char prepare_image[] = {
#embed "gfx950/prepare.hsaco"
};
alignas(4096) static const unsigned char quantize_image[] = {
#embed "gfx950/quantize.hsaco"
};
alignas(4096) static const unsigned char probe_image[] = {
#embed "gfx950/probe.hsaco"
};

static const void *const images[] = {
    [GEMM] = gemm_image, [PREPARE] = prepare_image, [QUANTIZE] = quantize_image, [PROBE] = probe_image};

#define OTHER_KERNEL(name, image) {#name, image, 0},
#define ROWS_KERNEL(name, ...) {#name, GEMM, 0},
#define DEPTH_KERNEL(name, ...) {#name, GEMM, 0},
static const struct mx_gpu_kernel kernels[] = {
#include "kernels.def"
};

// Indices of kernels, of the first one where there are several.
enum {
    PROBE_MATRIX = MX_GPU_OWN_KERNELS,
    PROBE_MEMORY,
    KERNELS = MX_LENGTH(kernels),
    GEMM_DEPTH = KERNELS - MX_LENGTH(mx_gfx950_depth_kernels),
    GEMM_ROWS = GEMM_DEPTH - MX_LENGTH(mx_gfx950_rows_kernels),
};
static_assert(KERNELS <= MX_GPU_KERNELS && GEMM_ROWS == PROBE_MEMORY + 1);

#define ON_DRIVER(which)                                                                                               \
    {.target = "gfx950",                                                                                               \
     .driver = (which),                                                                                                \
     .images = images,                                                                                                 \
     .kernels = kernels,                                                                                               \
     .image_count = MX_LENGTH(images),                                                                                 \
     .kernel_count = KERNELS}
static struct mx_gpu hip = ON_DRIVER(&mx_hip), emulator = ON_DRIVER(&mx_hip_emulator);

// Tensors of the CPU are the emulator's.
static struct mx_gpu *gpu_of(const struct mx_exec *exec) { return exec->device < 0 ? &emulator : &hip; }

// ------------------------------------------------------------------------------------------------------------- GEMMs

static struct mx_gfx950_plan plan_rows(const struct mx_rows_args *args, void *workspace) {
    const struct mx_gfx950_kernel *kernel = &mx_gfx950_rows_kernels[mx_gfx950_choose_rows(args)];
    return mx_gfx950_plan_rows(args, workspace, kernel);
}

static struct mx_gfx950_plan plan_depth(const struct mx_depth_args *args, void *workspace) {
    const struct mx_gfx950_kernel *kernel = &mx_gfx950_depth_kernels[mx_gfx950_choose_depth(args)];
    return mx_gfx950_plan_depth(args, workspace, kernel);
}

// Limits of the kernels: `tokens` is the axis that offs cut, `depth` the contraction's stride.
static int check_fits(int64_t tokens, int64_t depth, int64_t cols, struct mx_error *error) {
    if (tokens > INT32_MAX)
        return mx_fail(error, "offs must count at most 2^31 - 1 tokens on gfx950, got %lld", (long long)tokens);
    if (depth > MX_GFX950_MAX_DEPTH)
        return mx_fail(error, "the operands' last axis must have at most %d elements on gfx950, got %lld",
                       MX_GFX950_MAX_DEPTH, (long long)depth);
    if (cols > MX_GFX950_MAX_COLS)
        return mx_fail(error, "the output's last axis must have at most %d elements on gfx950, got %lld",
                       MX_GFX950_MAX_COLS, (long long)cols);
    return 0;
}

static int run_gemm(int prepare, int kernel, void *args, struct mx_gfx950_plan *plan, const struct mx_gpu_span *spans,
                    int32_t span_count, const struct mx_exec *exec, struct mx_error *error) {
    const struct mx_gpu_launch launches[] = {
        {prepare, MX_GFX950_THREADS, {(uint32_t)plan->prepare_blocks, 1, 1}},
        {kernel, MX_GFX950_THREADS, {(uint32_t)plan->blocks, 1, 1}},
    };
    const struct mx_gpu_call call = {
        .launches = launches,
        .launch_count = MX_LENGTH(launches),
        .parameters = (void *[]){args, plan},
        .spans = spans,
        .span_count = span_count,
    };
    return plan->blocks ? mx_gpu_run(gpu_of(exec), &call, exec, error) : 0;
}

static int gemm_rows(const struct mx_rows_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_rows_args copy = *args;
    struct mx_gfx950_plan plan = plan_rows(args, exec->workspace);
    const int64_t a = args->m * args->k, b = args->groups * args->n * args->k;
    const struct mx_gpu_span spans[] = {
        mx_gpu_reads(args->a, a),
        mx_gpu_reads(args->a_scale, a / MX_BLOCK),
        mx_gpu_reads(args->b, b),
        mx_gpu_reads(args->b_scale, b / MX_BLOCK),
        mx_gpu_reads(args->offs, args->groups * 4),
        mx_gpu_reads(args->bias, args->bias ? args->groups * args->n * 4 : 0),
        mx_gpu_writes(args->out, args->m * args->n * mx_type_bytes(args->out_type)),
        mx_gpu_writes(exec->workspace, plan.bytes),
    };
    return check_fits(args->m, args->k, args->n, error) ||
           run_gemm(MX_GPU_PREPARE_ROWS, GEMM_ROWS + mx_gfx950_choose_rows(args), &copy, &plan, spans, MX_LENGTH(spans),
                    exec, error);
}

static int gemm_depth(const struct mx_depth_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_depth_args copy = *args;
    struct mx_gfx950_plan plan = plan_depth(args, exec->workspace);
    const int64_t a = args->n * args->depth, b = args->k * args->depth;
    const struct mx_gpu_span spans[] = {
        mx_gpu_reads(args->a, a),
        mx_gpu_reads(args->a_scale, a / MX_BLOCK),
        mx_gpu_reads(args->b, b),
        mx_gpu_reads(args->b_scale, b / MX_BLOCK),
        mx_gpu_reads(args->offs, args->groups * 4),
        mx_gpu_writes(args->out, args->groups * args->n * args->k * mx_type_bytes(args->out_type)),
        mx_gpu_writes(exec->workspace, plan.bytes),
    };
    return check_fits(args->depth, args->depth, args->k, error) ||
           run_gemm(MX_GPU_PREPARE_DEPTH, GEMM_DEPTH + mx_gfx950_choose_depth(args), &copy, &plan, spans,
                    MX_LENGTH(spans), exec, error);
}

static int64_t rows_workspace(const struct mx_rows_args *args, const struct mx_exec *) {
    return plan_rows(args, nullptr).bytes;
}

static int64_t depth_workspace(const struct mx_depth_args *args, const struct mx_exec *) {
    return plan_depth(args, nullptr).bytes;
}

static int quantize(const struct mx_quantize_args *args, const struct mx_exec *exec, struct mx_error *error) {
    return mx_gpu_quantize(gpu_of(exec), args, exec, error);
}

static int zero_padding(const struct mx_padding_args *args, const struct mx_exec *exec, struct mx_error *error) {
    return mx_gpu_zero_padding(gpu_of(exec), args, exec, error);
}

// ------------------------------------------------------------------------------------------------------------- probe

// What the device does where the kernels rely on it, for mxfp8_moe/selftest/gfx950.py, which calls this by ctypes.
// `device` is -1 for the emulator.
[[gnu::visibility("default")]] int mxfp8_probe_gfx950(const struct mx_gfx950_probe_args *args, int32_t device,
                                                      void *stream, struct mx_error *error) {
    const int64_t lanes = 64;
    struct mx_gfx950_probe_args copy = *args;
    const struct mx_exec exec = {.stream = stream, .device = device};
    const struct mx_gpu_launch launches[] = {
        {PROBE_MATRIX, MX_GFX950_THREADS, {1, 1, 1}},
        {PROBE_MEMORY, MX_GFX950_THREADS, {1, 1, 1}},
    };
    const struct mx_gpu_span spans[] = {
        mx_gpu_reads(args->a, lanes * 32),           mx_gpu_reads(args->b, lanes * 32),
        mx_gpu_reads(args->a_scale, lanes * 4),      mx_gpu_reads(args->b_scale, lanes * 4),
        mx_gpu_reads(args->c, lanes * 16),           mx_gpu_writes(args->d, 16 * lanes * 16),
        mx_gpu_reads(args->offset, lanes * 4),       mx_gpu_reads(args->from, args->size),
        mx_gpu_writes(args->loaded, lanes * 16),     mx_gpu_writes(args->loaded_word, lanes * 4),
        mx_gpu_writes(args->copied, 2 * lanes * 16), mx_gpu_writes(args->to, args->size),
        mx_gpu_writes(args->to_word, args->size),
    };
    const struct mx_gpu_call call = {.launches = launches,
                                     .launch_count = MX_LENGTH(launches),
                                     .parameters = (void *[]){&copy},
                                     .spans = spans,
                                     .span_count = MX_LENGTH(spans)};
    struct mx_gpu *gpu = gpu_of(&exec);
    return mx_gpu_available(gpu, device < 0 ? 0 : device, error) || mx_gpu_run(gpu, &call, &exec, error);
}

// ---------------------------------------------------------------------------------------------------------- backends

static int available(int32_t device, struct mx_error *error) { return mx_gpu_available(&hip, device, error); }

static int emulator_available(int32_t, struct mx_error *error) { return mx_gpu_available(&emulator, 0, error); }

#define OPS                                                                                                            \
    .alignment = 16, .kernel_count = KERNELS, .kernels = kernels, .quantize = quantize, .gemm_rows = gemm_rows,        \
    .gemm_depth = gemm_depth, .zero_padding = zero_padding, .quantize_workspace = mx_gpu_no_workspace,                 \
    .gemm_rows_workspace = rows_workspace, .gemm_depth_workspace = depth_workspace

const struct mx_backend mx_gfx950 = {.name = "gfx950", .place = MX_ON_GPU, .available = available, OPS};

const struct mx_backend mx_gfx950_emulator = {
    .name = "gfx950-emu", .place = MX_ON_HOST_IF_NAMED, .available = emulator_available, OPS};
