// gfx950 (MI355X) behind the HIP runtime: which kernels an op launches, with which grids. And the same code objects on
// the emulator, which takes tensors of the CPU.
#include "../kernels/gfx950.h"

#include "../kernels/probe_gfx950.h"
#include "gpu.h"

#define LENGTH(array) (int32_t)(sizeof(array) / sizeof *(array))

enum image { GEMM, PREPARE, QUANTIZE, PROBE };

alignas(4096) static const unsigned char gemm_image[] = {
#embed "gemm_gfx950.hsaco"
};
alignas(4096) static const unsigned char prepare_image[] = {
#embed "prepare_gfx950.hsaco"
};
alignas(4096) static const unsigned char quantize_image[] = {
#embed "quantize_gfx950.hsaco"
};
alignas(4096) static const unsigned char probe_image[] = {
#embed "probe_gfx950.hsaco"
};

static const void *const images[] = {
    [GEMM] = gemm_image, [PREPARE] = prepare_image, [QUANTIZE] = quantize_image, [PROBE] = probe_image};

#define INDEX(name, ...) INDEX_##name,
#define KERNEL(name, ...) {#name, GEMM},
// Quantizers by orientation, then input type (enum mx_type).
enum kernel {
    PREPARE_ROWS,
    PREPARE_DEPTH,
    QUANTIZE_ROWS,
    QUANTIZE_COLS = QUANTIZE_ROWS + 2,
    QUANTIZE_BOTH = QUANTIZE_COLS + 2,
    ZERO_PADDING = QUANTIZE_BOTH + 2,
    PROBE_MATRIX,
    PROBE_MEMORY,
    GEMM_ROWS,
    BEFORE_ROWS = GEMM_ROWS - 1,
    MX_GFX950_ROWS_KERNELS(INDEX) GEMM_DEPTH,
    BEFORE_DEPTH = GEMM_DEPTH - 1,
    MX_GFX950_DEPTH_KERNELS(INDEX) KERNELS,
};
static_assert(KERNELS <= MX_GPU_KERNELS);

static const struct mx_gpu_kernel kernels[KERNELS] = {[PREPARE_ROWS] = {"mx_prepare_rows_gfx950", PREPARE},
                                                      [PREPARE_DEPTH] = {"mx_prepare_depth_gfx950", PREPARE},
                                                      [QUANTIZE_ROWS] = {"mx_quantize_rows_bf16_gfx950", QUANTIZE},
                                                      {"mx_quantize_rows_f32_gfx950", QUANTIZE},
                                                      [QUANTIZE_COLS] = {"mx_quantize_cols_bf16_gfx950", QUANTIZE},
                                                      {"mx_quantize_cols_f32_gfx950", QUANTIZE},
                                                      [QUANTIZE_BOTH] = {"mx_quantize_both_bf16_gfx950", QUANTIZE},
                                                      {"mx_quantize_both_f32_gfx950", QUANTIZE},
                                                      [ZERO_PADDING] = {"mx_zero_padding_gfx950", QUANTIZE},
                                                      [PROBE_MATRIX] = {"mx_probe_matrix_gfx950", PROBE},
                                                      [PROBE_MEMORY] = {"mx_probe_memory_gfx950", PROBE},
                                                      [GEMM_ROWS] = MX_GFX950_ROWS_KERNELS(KERNEL) // then depth's
                                                      MX_GFX950_DEPTH_KERNELS(KERNEL)};
#undef KERNEL
#undef INDEX

#define ON_DRIVER(which)                                                                                               \
    {.target = "gfx950",                                                                                               \
     .driver = (which),                                                                                                \
     .images = images,                                                                                                 \
     .kernels = kernels,                                                                                               \
     .image_count = LENGTH(images),                                                                                    \
     .kernel_count = KERNELS}
static struct mx_gpu hip = ON_DRIVER(&mx_hip), emulator = ON_DRIVER(&mx_hip_emulator);

static const struct mx_gfx950_kernel rows_kernels[] = {MX_GFX950_ROWS_KERNELS(MX_GFX950_KERNEL_LINE)};
static const struct mx_gfx950_kernel depth_kernels[] = {MX_GFX950_DEPTH_KERNELS(MX_GFX950_KERNEL_LINE)};

// Tensors of the CPU are the emulator's.
static struct mx_gpu *gpu_of(const struct mx_exec *exec) { return exec->device < 0 ? &emulator : &hip; }

static int64_t type_bytes(int32_t type) { return type == MX_F32 ? 4 : 2; }

static struct mx_gpu_span reads(const void *data, int64_t bytes) { return (struct mx_gpu_span){data, bytes, false}; }

static struct mx_gpu_span writes(const void *data, int64_t bytes) { return (struct mx_gpu_span){data, bytes, true}; }

// ------------------------------------------------------------------------------------------------------------- GEMMs

static struct mx_gfx950_plan plan_rows(const struct mx_rows_args *args, void *workspace) {
    const struct mx_gfx950_kernel *kernel = &rows_kernels[mx_gfx950_choose_rows(args)];
    return mx_gfx950_plan_rows(args, workspace, kernel->tile_rows, kernel->tile_cols);
}

static struct mx_gfx950_plan plan_depth(const struct mx_depth_args *args, void *workspace) {
    const struct mx_gfx950_kernel *kernel = &depth_kernels[mx_gfx950_choose_depth(args)];
    return mx_gfx950_plan_depth(args, workspace, kernel->tile_rows, kernel->tile_cols);
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
    const struct mx_gpu_call call = {launches, plan->blocks ? LENGTH(launches) : 0, span_count, (void *[]){args, plan},
                                     spans};
    return mx_gpu_run(gpu_of(exec), &call, exec, error);
}

static int gemm_rows(const struct mx_rows_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_rows_args copy = *args;
    struct mx_gfx950_plan plan = plan_rows(args, exec->workspace);
    const int64_t a = args->m * args->k, b = args->groups * args->n * args->k;
    const struct mx_gpu_span spans[] = {
        reads(args->a, a),
        reads(args->a_scale, a / MX_BLOCK),
        reads(args->b, b),
        reads(args->b_scale, b / MX_BLOCK),
        reads(args->offs, args->groups * 4),
        reads(args->bias, args->groups * args->n * 4),
        writes(args->out, args->m * args->n * type_bytes(args->out_type)),
        writes(exec->workspace, plan.bytes),
    };
    return check_fits(args->m, args->k, args->n, error) ||
           run_gemm(PREPARE_ROWS, GEMM_ROWS + mx_gfx950_choose_rows(args), &copy, &plan, spans, LENGTH(spans), exec,
                    error);
}

static int gemm_depth(const struct mx_depth_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_depth_args copy = *args;
    struct mx_gfx950_plan plan = plan_depth(args, exec->workspace);
    const int64_t a = args->n * args->depth, b = args->k * args->depth;
    const struct mx_gpu_span spans[] = {
        reads(args->a, a),
        reads(args->a_scale, a / MX_BLOCK),
        reads(args->b, b),
        reads(args->b_scale, b / MX_BLOCK),
        reads(args->offs, args->groups * 4),
        writes(args->out, args->groups * args->n * args->k * type_bytes(args->out_type)),
        writes(exec->workspace, plan.bytes),
    };
    return check_fits(args->depth, args->depth, args->k, error) ||
           run_gemm(PREPARE_DEPTH, GEMM_DEPTH + mx_gfx950_choose_depth(args), &copy, &plan, spans, LENGTH(spans), exec,
                    error);
}

static int64_t rows_workspace(const struct mx_rows_args *args, const struct mx_exec *) {
    return plan_rows(args, nullptr).bytes;
}

static int64_t depth_workspace(const struct mx_depth_args *args, const struct mx_exec *) {
    return plan_depth(args, nullptr).bytes;
}

// ------------------------------------------------------------------------------------------- quantize, zero_padding

// Token tiles of the quantizers' contract, spread over two axes of the grid.
static struct mx_gpu_launch quantize_launch(const struct mx_quantize_args *args) {
    enum { TILE = MX_GROUP_ALIGN, AXIS = 32768 };
    const int kernel = !args->col_data ? QUANTIZE_ROWS : args->row_data ? QUANTIZE_BOTH : QUANTIZE_COLS;
    int64_t tiles = args->batch * mx_gfx950_div_up(args->rows, TILE);
    if (kernel == QUANTIZE_ROWS)
        tiles = mx_gfx950_div_up(args->batch * args->rows, TILE);
    else if (args->offs)
        tiles = (args->row_data ? mx_padded_tokens(args->rows, args->groups + 1) : args->col_k) / TILE;
    int64_t y = tiles < AXIS ? tiles : AXIS;
    return (struct mx_gpu_launch){
        kernel + args->x_type,
        MX_GFX950_THREADS,
        {(uint32_t)mx_gfx950_div_up(args->cols, TILE), (uint32_t)y, (uint32_t)(y ? mx_gfx950_div_up(tiles, y) : 0)},
    };
}

static int quantize(const struct mx_quantize_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_quantize_args copy = *args;
    const struct mx_gpu_launch launch = quantize_launch(args);
    const int64_t row = args->batch * args->rows * args->row_k, col = args->batch * args->cols * args->col_k;
    const struct mx_gpu_span spans[] = {
        reads(args->x, args->batch * args->rows * args->cols * type_bytes(args->x_type)),
        reads(args->offs, args->groups * 4),
        writes(args->row_data, row),
        writes(args->row_scale, row / MX_BLOCK),
        writes(args->col_data, col),
        writes(args->col_scale, col / MX_BLOCK),
    };
    const struct mx_gpu_call call = {&launch, 1, LENGTH(spans), (void *[]){&copy}, spans};
    return mx_gpu_run(gpu_of(exec), &call, exec, error);
}

static int64_t no_workspace(const struct mx_quantize_args *, const struct mx_exec *) { return 0; }

static int zero_padding(const struct mx_padding_args *args, const struct mx_exec *exec, struct mx_error *error) {
    enum { ROWS_PER_BLOCK = 4, BYTES_PER_BLOCK = 1 << 14, MOST_BLOCKS = 64 };
    struct mx_padding_args copy = *args;
    const int64_t blocks = mx_gfx950_div_up(args->depth, BYTES_PER_BLOCK), bytes = args->rows * args->depth;
    const struct mx_gpu_launch launch = {
        ZERO_PADDING,
        MX_GFX950_THREADS,
        {(uint32_t)mx_gfx950_div_up(args->rows, ROWS_PER_BLOCK),
         (uint32_t)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), 1},
    };
    const struct mx_gpu_span spans[] = {
        writes(args->data, bytes),
        writes(args->scale, bytes / MX_BLOCK),
        reads(args->offs, args->groups * 4),
    };
    const struct mx_gpu_call call = {&launch, 1, LENGTH(spans), (void *[]){&copy}, spans};
    return mx_gpu_run(gpu_of(exec), &call, exec, error);
}

// ------------------------------------------------------------------------------------------------------------- probe

// What the device does where the kernels rely on it: for mxfp8_moe/selftest.py, which calls it by ctypes. `device` is
// -1 for the emulator.
[[gnu::visibility("default")]] int mxfp8_probe_gfx950(const struct mx_gfx950_probe_args *args, int32_t device,
                                                      void *stream, struct mx_error *error);
int mxfp8_probe_gfx950(const struct mx_gfx950_probe_args *args, int32_t device, void *stream, struct mx_error *error) {
    enum { WAVE = 64 };
    struct mx_gfx950_probe_args copy = *args;
    const struct mx_exec exec = {.stream = stream, .device = device};
    const struct mx_gpu_launch launches[] = {
        {PROBE_MATRIX, MX_GFX950_THREADS, {1, 1, 1}},
        {PROBE_MEMORY, MX_GFX950_THREADS, {1, 1, 1}},
    };
    const struct mx_gpu_span spans[] = {
        reads(args->a, WAVE * 32),           reads(args->b, WAVE * 32),           reads(args->a_scale, WAVE * 4),
        reads(args->b_scale, WAVE * 4),      reads(args->c, WAVE * 16),           writes(args->d, 16 * WAVE * 16),
        reads(args->offset, WAVE * 4),       reads(args->from, args->size),       writes(args->loaded, WAVE * 16),
        writes(args->copied, 2 * WAVE * 16), writes(args->loaded_word, WAVE * 4), writes(args->to, args->size),
        writes(args->to_word, args->size),
    };
    const struct mx_gpu_call call = {launches, LENGTH(launches), LENGTH(spans), (void *[]){&copy}, spans};
    return mx_gpu_available(gpu_of(&exec), device < 0 ? 0 : device, error) ||
           mx_gpu_run(gpu_of(&exec), &call, &exec, error);
}

// ---------------------------------------------------------------------------------------------------------- backends

static int available(int32_t device, struct mx_error *error) { return mx_gpu_available(&hip, device, error); }

static int emulator_available(int32_t, struct mx_error *error) { return mx_gpu_available(&emulator, 0, error); }

#define OPS                                                                                                            \
    .alignment = 16, .quantize = quantize, .gemm_rows = gemm_rows, .gemm_depth = gemm_depth,                           \
    .zero_padding = zero_padding, .quantize_workspace = no_workspace, .gemm_rows_workspace = rows_workspace,           \
    .gemm_depth_workspace = depth_workspace

const struct mx_backend mx_gfx950 = {.name = "gfx950", .place = MX_ON_GPU, .available = available, OPS};

const struct mx_backend mx_gfx950_emulator = {
    .name = "gfx950-emu", .place = MX_ON_HOST_IF_NAMED, .available = emulator_available, OPS};
