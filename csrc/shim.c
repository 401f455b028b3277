// torch.ops.mxfp8.*: schemas, argument checks, allocation of outputs, and the call into a backend. Plain C on
// libtorch's stable C ABI, so one binary serves every torch from 2.11 on, CPU, CUDA and ROCm builds alike.
//
// An op is one line of `ops` at the end of this file. Its function gets unpacked arguments and gives either outputs or
// an error text; `run_op` owns every handle in between.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "mxfp8.h"
#include "torch_abi.h"

enum { MAX_PARAMS = 9, MAX_OUTPUTS = 4, MAX_DIM = 3 };

struct value {
    char name[16]; // the parameter's name in the schema
    bool present;  // false for an optional that was not given
    // Tensor
    AtenTensorHandle handle;
    void *data;
    int64_t dim;
    int64_t *sizes, *strides;
    int32_t dtype, device_type, device_index;
    // str, bool and ScalarType
    const char *text;
    int32_t number;
};

struct op {
    const char *name;                   // with overload name
    const char *params[MAX_PARAMS + 1]; // schema fragments; "*" starts the keyword-only ones
    const char *returns;
    int outputs;
    int (*run)(const struct value *in, AtenTensorHandle *out, struct mx_error *error);
};

// ---------------------------------------------------------------------------------------------- text for messages

static const char *dtype_name(int32_t dtype) {
    const struct {
        int32_t dtype;
        const char *name;
    } known[] = {
        {aoti_torch_dtype_bfloat16(), "bfloat16"},
        {aoti_torch_dtype_float16(), "float16"},
        {aoti_torch_dtype_float32(), "float32"},
        {aoti_torch_dtype_float64(), "float64"},
        {aoti_torch_dtype_uint8(), "uint8"},
        {aoti_torch_dtype_int32(), "int32"},
        {aoti_torch_dtype_int64(), "int64"},
        {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
        {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
        {torch_dtype_float8_e8m0fnu(), "float8_e8m0fnu"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].dtype == dtype)
            return known[i].name;
    return "another dtype";
}

struct text {
    char chars[96];
};

static struct text list_text(int64_t count, const int64_t *numbers) {
    struct text text = {"["};
    size_t used = 1;
    for (int64_t i = 0; i < count && used < sizeof text.chars; i++)
        used +=
            (size_t)snprintf(text.chars + used, sizeof text.chars - used, i ? ", %lld" : "%lld", (long long)numbers[i]);
    if (used < sizeof text.chars)
        snprintf(text.chars + used, sizeof text.chars - used, "]");
    return text;
}

static struct text device_text(const struct value *v) {
    struct text text;
    if (v->device_type == aoti_torch_device_type_cpu())
        snprintf(text.chars, sizeof text.chars, "cpu");
    else if (v->device_type == aoti_torch_device_type_cuda())
        snprintf(text.chars, sizeof text.chars, "cuda:%d", v->device_index);
    else
        snprintf(text.chars, sizeof text.chars, "device type %d, index %d", v->device_type, v->device_index);
    return text;
}

// --------------------------------------------------------------------------------------------------------- checks

static int check_dtype(const struct value *v, int32_t dtype, struct mx_error *error) {
    if (v->dtype == dtype)
        return 0;
    return mx_fail(error, "%s must be %s, got %s", v->name, dtype_name(dtype), dtype_name(v->dtype));
}

static int check_rank(const struct value *v, int64_t rank, const char *meaning, struct mx_error *error) {
    if (v->dim == rank)
        return 0;
    return mx_fail(error, "%s must be a %lld-D tensor %s, got shape %s", v->name, (long long)rank, meaning,
                   list_text(v->dim, v->sizes).chars);
}

static int check_contiguous(const struct value *v, struct mx_error *error) {
    int64_t elements = 1;
    for (int64_t i = 0; i < v->dim; i++)
        elements *= v->sizes[i];
    if (elements == 0)
        return 0;
    int64_t stride = 1;
    for (int64_t i = v->dim - 1; i >= 0; i--) {
        if (v->sizes[i] > 1 && v->strides[i] != stride)
            return mx_fail(error, "%s must be contiguous, got shape %s with strides %s", v->name,
                           list_text(v->dim, v->sizes).chars, list_text(v->dim, v->strides).chars);
        stride *= v->sizes[i];
    }
    return 0;
}

static int check_device(const struct value *v, const struct value *first, struct mx_error *error) {
    if (v->device_type == first->device_type && v->device_index == first->device_index)
        return 0;
    return mx_fail(error, "%s must be on %s like %s, got %s", v->name, device_text(first).chars, first->name,
                   device_text(v).chars);
}

// Everything that the later arguments of an op have in common: dtype, exact shape, contiguity, device.
static int check_like(const struct value *v, int32_t dtype, int64_t dim, const int64_t *sizes,
                      const struct value *first, struct mx_error *error) {
    if (check_dtype(v, dtype, error) || check_device(v, first, error))
        return 1;
    if (v->dim != dim || (dim && memcmp(v->sizes, sizes, (size_t)dim * sizeof *sizes) != 0))
        return mx_fail(error, "%s must have shape %s, got %s", v->name, list_text(dim, sizes).chars,
                       list_text(v->dim, v->sizes).chars);
    return check_contiguous(v, error);
}

// An E4M3 operand of the given rank and its E8M0 scales: same leading sizes, one scale per MX_BLOCK of the last axis.
static int check_operand(const struct value *data, const struct value *scale, int64_t rank, const char *meaning,
                         const struct value *first, struct mx_error *error) {
    if (check_dtype(data, aoti_torch_dtype_float8_e4m3fn(), error) || check_rank(data, rank, meaning, error))
        return 1;
    if (check_device(data, first, error) || check_contiguous(data, error))
        return 1;
    int64_t sizes[MAX_DIM];
    memcpy(sizes, data->sizes, (size_t)rank * sizeof *sizes);
    if (sizes[rank - 1] % MX_BLOCK)
        return mx_fail(error, "%s must have a last axis that is a multiple of %d, got shape %s", data->name, MX_BLOCK,
                       list_text(rank, data->sizes).chars);
    sizes[rank - 1] /= MX_BLOCK;
    return check_like(scale, torch_dtype_float8_e8m0fnu(), rank, sizes, first, error);
}

static int check_offs(const struct value *offs, const struct value *first, struct mx_error *error) {
    if (check_rank(offs, 1, "with one cumulative end per group", error))
        return 1;
    return check_like(offs, aoti_torch_dtype_int32(), 1, offs->sizes, first, error);
}

static int parse_rounding(const struct value *rounding, int32_t *mode, struct mx_error *error) {
    static const char *const names[] = {
#define ROUNDING_NAME(name, threshold) #name,
        MX_ROUNDING_MODES(ROUNDING_NAME)
#undef ROUNDING_NAME
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(rounding->text, names[i]) == 0)
            return *mode = (int32_t)i, 0;
#define ROUNDING_LIST(name, threshold) " " #name
    return mx_fail(error, "rounding must be one of" MX_ROUNDING_MODES(ROUNDING_LIST) ", got '%s'", rounding->text);
#undef ROUNDING_LIST
}

// The output type that an optional ScalarType asks for; bfloat16 when it was not given.
static int parse_out_type(const struct value *out_dtype, int32_t *type, struct mx_error *error) {
    if (!out_dtype->present || out_dtype->number == aoti_torch_dtype_bfloat16())
        return *type = MX_BF16, 0;
    if (out_dtype->number == aoti_torch_dtype_float32())
        return *type = MX_F32, 0;
    return mx_fail(error, "out_dtype must be bfloat16 or float32, got %s", dtype_name(out_dtype->number));
}

static int32_t torch_dtype(int32_t type) {
    return type == MX_F32 ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
}

// ------------------------------------------------------------------------------------------------ backend and exec

// Appends to a text of the given size, which stays whole and terminated.
[[gnu::format(printf, 3, 4)]] static void append(char *text, size_t size, const char *format, ...) {
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

// Tensors of a GPU go to the backend of its architecture, those of the CPU to the best level of this machine or to what
// MXFP8_BACKEND names.
static int pick_backend(const struct value *first, const struct mx_backend **backend, struct mx_error *error) {
    const bool gpu = first->device_type == aoti_torch_device_type_cuda();
    if (!gpu && first->device_type != aoti_torch_device_type_cpu())
        return mx_fail(error, "%s is on %s; expected cpu or cuda", first->name, device_text(first).chars);
    const char *wanted = gpu ? nullptr : getenv("MXFP8_BACKEND");
    if (wanted && (!*wanted || strcmp(wanted, "cpu") == 0))
        wanted = nullptr;
    char reasons[sizeof error->text] = "";
    int count;
    const struct mx_backend *const *backends = mx_backends(&count);
    for (int i = 0; i < count; i++) {
        const enum mx_place place = backends[i]->place;
        if (gpu != (place == MX_ON_GPU) || (!wanted && place == MX_ON_HOST_IF_NAMED))
            continue;
        if (wanted && strcmp(wanted, backends[i]->name) != 0)
            continue;
        struct mx_error why_not;
        if (!backends[i]->available(first->device_index, &why_not))
            return *backend = backends[i], 0;
        append(reasons, sizeof reasons, "; %s: %s", backends[i]->name, why_not.text);
    }
    if (gpu)
        return mx_fail(error, "%s is on %s, which no backend runs%s", first->name, device_text(first).chars, reasons);
    if (!*reasons)
        for (int i = 0; i < count; i++)
            if (backends[i]->place != MX_ON_GPU)
                append(reasons, sizeof reasons, "%s%s", *reasons ? ", " : "; expected cpu, ", backends[i]->name);
    return mx_fail(error, "MXFP8_BACKEND is '%s', which this machine cannot run%s", wanted, reasons);
}

static int parallel_for(int64_t count, void (*body)(int64_t, int64_t, void *), void *context) {
    return torch_parallel_for(0, count, 1, body, context);
}

// One call into a backend.
struct call {
    const struct mx_backend *backend;
    struct mx_exec exec;
    AtenTensorHandle workspace;
};

static int begin(const struct value *first, struct call *call, struct mx_error *error) {
    *call = (struct call){.exec = {.device = -1, .parallel_for = parallel_for}};
    if (pick_backend(first, &call->backend, error))
        return 1;
    if (call->backend->place == MX_ON_GPU) {
        call->exec.device = first->device_index;
        if (!aoti_torch_get_current_cuda_stream ||
            aoti_torch_get_current_cuda_stream(call->exec.device, &call->exec.stream))
            return mx_fail(error, "torch gave no stream for %s", device_text(first).chars);
        return 0;
    }
    uint32_t threads;
    if (torch_get_num_threads(&threads))
        return mx_fail(error, "torch_get_num_threads failed");
    call->exec.threads = (int32_t)threads;
    return 0;
}

static int check_aligned(const struct call *call, const struct value *data, struct mx_error *error) {
    uintptr_t address = (uintptr_t)data->data;
    if (address % (uintptr_t)call->backend->alignment == 0)
        return 0;
    return mx_fail(error, "%s must start at a multiple of %d bytes on %s, got address 0x%llx", data->name,
                   call->backend->alignment, call->backend->name, (unsigned long long)address);
}

// Untouched memory costs a page fault per 4 KiB at its first write, as much time as the kernels that fill a large
// output take themselves. Only a hint: where it is refused, nothing changes.
static void prefer_huge_pages(void *data, int64_t bytes) {
    enum { PAGE = 4096, WORTHWHILE = 4 << 20 };
    uintptr_t begin = ((uintptr_t)data + PAGE - 1) / PAGE * PAGE,
              end = ((uintptr_t)data + (uintptr_t)bytes) / PAGE * PAGE;
    if (bytes >= WORTHWHILE)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}

// A new contiguous tensor on the device of `like`.
static int allocate(int64_t dim, const int64_t *sizes, int32_t dtype, const struct value *like, AtenTensorHandle *out,
                    void **data, struct mx_error *error) {
    int64_t strides[MAX_DIM], stride = 1, bytes;
    for (int64_t i = dim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= sizes[i] > 1 ? sizes[i] : 1;
    }
    if (aoti_torch_empty_strided(dim, sizes, strides, dtype, like->device_type, like->device_index, out) ||
        aoti_torch_get_data_ptr(*out, data) || aoti_torch_get_storage_size(*out, &bytes))
        return mx_fail(error, "out of memory: could not allocate %s of shape %s", dtype_name(dtype),
                       list_text(dim, sizes).chars);
    if (like->device_type == aoti_torch_device_type_cpu())
        prefer_huge_pages(*data, bytes);
    return 0;
}

static int reserve(struct call *call, int64_t bytes, const struct value *like, struct mx_error *error) {
    if (bytes == 0)
        return 0;
    return allocate(1, &bytes, aoti_torch_dtype_uint8(), like, &call->workspace, &call->exec.workspace, error);
}

// The workspace can go as soon as the work is queued on the stream that allocated it.
static int finish(struct call *call, int failed) {
    if (call->workspace)
        aoti_torch_delete_tensor_object(call->workspace);
    return failed;
}

// ------------------------------------------------------------------------------------------------------- quantize

// Shapes and allocates one orientation: data, and scale with its last axis divided by MX_BLOCK.
static int allocate_pair(int64_t dim, const int64_t *sizes, const struct value *x, AtenTensorHandle *out,
                         uint8_t **data, uint8_t **scale, struct mx_error *error) {
    int64_t scale_sizes[MAX_DIM];
    memcpy(scale_sizes, sizes, (size_t)dim * sizeof *sizes);
    scale_sizes[dim - 1] /= MX_BLOCK;
    void *pointers[2];
    if (allocate(dim, sizes, aoti_torch_dtype_float8_e4m3fn(), x, &out[0], &pointers[0], error) ||
        allocate(dim, scale_sizes, torch_dtype_float8_e8m0fnu(), x, &out[1], &pointers[1], error))
        return 1;
    *data = pointers[0];
    *scale = pointers[1];
    return 0;
}

static int check_x(const struct value *x, struct mx_error *error) {
    if (x->dtype != aoti_torch_dtype_bfloat16() && x->dtype != aoti_torch_dtype_float32())
        return mx_fail(error, "%s must be bfloat16 or float32, got %s", x->name, dtype_name(x->dtype));
    if (x->dim != 2 && x->dim != 3)
        return mx_fail(error, "%s must be 2-D [tokens, features] or 3-D [experts, rows, columns], got shape %s",
                       x->name, list_text(x->dim, x->sizes).chars);
    return check_contiguous(x, error);
}

// Column blocks need groups: offs for tokens, the leading axis for weights.
static int check_groups(const struct value *x, const struct value *offs, struct mx_error *error) {
    if (x->dim == 3 && offs->present)
        return mx_fail(error, "offs must be None for a 3-D %s, whose leading axis is the group, got a tensor", x->name);
    if (x->dim == 2 && !offs->present)
        return mx_fail(error, "offs must be an int32 tensor of cumulative group ends for a 2-D %s, got None", x->name);
    return offs->present ? check_offs(offs, x, error) : 0;
}

static int quantize(const struct value *x, const struct value *offs, const struct value *rounding, bool rows,
                    AtenTensorHandle *out, struct mx_error *error) {
    struct mx_quantize_args args = {.x = x->data,
                                    .x_type = x->dtype == aoti_torch_dtype_float32() ? MX_F32 : MX_BF16,
                                    .wants = (rows ? MX_ROWS : 0) | (offs ? MX_COLS : 0)};
    if (check_x(x, error) || (offs && check_groups(x, offs, error)))
        return 1;
    if (parse_rounding(rounding, &args.rounding, error))
        return 1;
    int64_t dim = x->dim;
    args.batch = dim == 3 ? x->sizes[0] : 1;
    args.rows = x->sizes[dim - 2];
    args.cols = x->sizes[dim - 1];
    args.row_k = mx_round_up(args.cols, MX_BLOCK);
    args.col_k = mx_round_up(args.rows, MX_BLOCK);
    if (offs && offs->present) {
        args.grouped = 1;
        args.offs = offs->data;
        args.groups = offs->sizes[0];
        args.col_k = mx_padded_tokens(args.rows, args.groups);
    }
    int64_t row_sizes[] = {args.batch, args.rows, args.row_k}, col_sizes[] = {args.batch, args.cols, args.col_k};
    if (rows && allocate_pair(dim, row_sizes + (3 - dim), x, out, &args.row_data, &args.row_scale, error))
        return 1;
    if (offs &&
        allocate_pair(dim, col_sizes + (3 - dim), x, out + (rows ? 2 : 0), &args.col_data, &args.col_scale, error))
        return 1;

    struct call call;
    if (begin(x, &call, error) || reserve(&call, call.backend->quantize_workspace(&args, &call.exec), x, error))
        return 1;
    return finish(&call, call.backend->quantize(&args, &call.exec, error));
}

static int quantize_rows(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    return quantize(&in[0], nullptr, &in[1], true, out, error);
}

static int quantize_cols(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    return quantize(&in[0], &in[1], &in[2], false, out, error);
}

static int quantize_both(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    return quantize(&in[0], &in[1], &in[2], true, out, error);
}

static int zero_padding(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    (void)out;
    const struct value *data = &in[0], *scale = &in[1], *offs = &in[2];
    if (check_operand(data, scale, 2, "[rows, tokens]", data, error) || check_offs(offs, data, error))
        return 1;
    struct mx_padding_args args = {.data = data->data,
                                   .scale = scale->data,
                                   .offs = offs->data,
                                   .rows = data->sizes[0],
                                   .depth = data->sizes[1],
                                   .groups = offs->sizes[0]};
    struct call call;
    return begin(data, &call, error) || check_aligned(&call, data, error) ||
           call.backend->zero_padding(&args, &call.exec, error);
}

// ------------------------------------------------------------------------------------------------------- gemm_rows

static int gemm_rows(const struct value *in, const struct value *bias, const struct value *out_dtype,
                     AtenTensorHandle *out, struct mx_error *error) {
    const struct value *a = &in[0], *a_scale = &in[1], *b = &in[2], *b_scale = &in[3], *offs = &in[4];
    if (check_operand(a, a_scale, 2, "[tokens, contraction]", a, error))
        return 1;
    if (check_operand(b, b_scale, 3, "[experts, columns, contraction]", a, error))
        return 1;
    if (a->sizes[1] != b->sizes[2])
        return mx_fail(error, "%s must have the contraction of %s, %lld, as its last axis, got shape %s", b->name,
                       a->name, (long long)a->sizes[1], list_text(3, b->sizes).chars);
    if (check_like(offs, aoti_torch_dtype_int32(), 1, b->sizes, a, error))
        return 1;
    struct mx_rows_args args = {.a = a->data,
                                .a_scale = a_scale->data,
                                .b = b->data,
                                .b_scale = b_scale->data,
                                .offs = offs->data,
                                .m = a->sizes[0],
                                .n = b->sizes[1],
                                .k = a->sizes[1],
                                .groups = b->sizes[0]};
    if (bias && bias->present) {
        if (check_like(bias, aoti_torch_dtype_float32(), 2, b->sizes, a, error))
            return 1;
        args.bias = bias->data;
    }
    if (parse_out_type(out_dtype, &args.out_type, error))
        return 1;
    int64_t sizes[] = {args.m, args.n};
    if (allocate(2, sizes, torch_dtype(args.out_type), a, out, &args.out, error))
        return 1;
    struct call call;
    if (begin(a, &call, error) || check_aligned(&call, a, error) || check_aligned(&call, b, error) ||
        reserve(&call, call.backend->gemm_rows_workspace(&args, &call.exec), a, error))
        return 1;
    return finish(&call, call.backend->gemm_rows(&args, &call.exec, error));
}

static int grouped_mm(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    return gemm_rows(in, &in[5], &in[6], out, error);
}

static int grouped_mm_dgrad(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    return gemm_rows(in, nullptr, &in[5], out, error);
}

// ------------------------------------------------------------------------------------------------------ gemm_depth

static int check_depth(const struct value *in, struct mx_depth_args *args, struct mx_error *error) {
    const struct value *a = &in[0], *a_scale = &in[1], *b = &in[2], *b_scale = &in[3], *offs = &in[4];
    if (check_operand(a, a_scale, 2, "[rows, tokens]", a, error) ||
        check_operand(b, b_scale, 2, "[columns, tokens]", a, error))
        return 1;
    if (a->sizes[1] != b->sizes[1])
        return mx_fail(error, "%s must have the tokens of %s, %lld, as its last axis, got shape %s", b->name, a->name,
                       (long long)a->sizes[1], list_text(2, b->sizes).chars);
    if (check_offs(offs, a, error))
        return 1;
    *args = (struct mx_depth_args){.a = a->data,
                                   .a_scale = a_scale->data,
                                   .b = b->data,
                                   .b_scale = b_scale->data,
                                   .offs = offs->data,
                                   .n = a->sizes[0],
                                   .k = b->sizes[0],
                                   .depth = a->sizes[1],
                                   .groups = offs->sizes[0]};
    return 0;
}

static int gemm_depth(const struct mx_depth_args *args, const struct value *in, struct mx_error *error) {
    struct call call;
    if (begin(in, &call, error) || check_aligned(&call, &in[0], error) || check_aligned(&call, &in[2], error) ||
        reserve(&call, call.backend->gemm_depth_workspace(args, &call.exec), in, error))
        return 1;
    return finish(&call, call.backend->gemm_depth(args, &call.exec, error));
}

static int grouped_mm_wgrad(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    struct mx_depth_args args;
    if (check_depth(in, &args, error) || parse_out_type(&in[6], &args.out_type, error))
        return 1;
    args.plain = in[5].number;
    int64_t sizes[] = {args.groups, args.n, args.k};
    if (allocate(3, sizes, torch_dtype(args.out_type), &in[0], out, &args.out, error))
        return 1;
    return gemm_depth(&args, in, error);
}

static int grouped_mm_wgrad_accumulate(const struct value *in, AtenTensorHandle *out, struct mx_error *error) {
    (void)out;
    const struct value *main_grad = &in[5];
    struct mx_depth_args args;
    if (check_depth(in, &args, error))
        return 1;
    int64_t sizes[] = {args.groups, args.n, args.k};
    if (check_like(main_grad, aoti_torch_dtype_float32(), 3, sizes, &in[0], error))
        return 1;
    args.out = main_grad->data;
    args.out_type = MX_F32;
    args.accumulate = 1;
    args.plain = in[6].number;
    return gemm_depth(&args, in, error);
}

// -------------------------------------------------------------------------------------------------- boxed arguments

enum kind { TENSOR, OPTIONAL_TENSOR, STRING, BOOL, OPTIONAL_DTYPE };

static enum kind kind_of(const char *param) {
    if (strncmp(param, "Tensor?", 7) == 0)
        return OPTIONAL_TENSOR;
    if (strncmp(param, "Tensor", 6) == 0)
        return TENSOR;
    if (strncmp(param, "str ", 4) == 0)
        return STRING;
    if (strncmp(param, "bool ", 5) == 0)
        return BOOL;
    return OPTIONAL_DTYPE; // "ScalarType?"
}

static void *pointer_of(StableIValue slot) { return (void *)(uintptr_t)slot; }

// An optional's slot is null or points to the slot of its value.
static StableIValue value_slot(enum kind kind, StableIValue slot) {
    return kind == OPTIONAL_TENSOR || kind == OPTIONAL_DTYPE ? *(StableIValue *)pointer_of(slot) : slot;
}

static int unpack_tensor(StableIValue slot, struct value *v, struct mx_error *error) {
    v->handle = pointer_of(slot);
    if (aoti_torch_get_data_ptr(v->handle, &v->data) || aoti_torch_get_dim(v->handle, &v->dim) ||
        aoti_torch_get_sizes(v->handle, &v->sizes) || aoti_torch_get_strides(v->handle, &v->strides) ||
        aoti_torch_get_dtype(v->handle, &v->dtype) || aoti_torch_get_device_type(v->handle, &v->device_type) ||
        aoti_torch_get_device_index(v->handle, &v->device_index))
        return mx_fail(error, "%s is a tensor without plain strided storage", v->name);
    return 0;
}

static int unpack(const char *param, StableIValue slot, struct value *v, struct mx_error *error) {
    const char *name = strrchr(param, ' ') + 1;
    memcpy(v->name, name, strcspn(name, "=")); // v is all zeros, and every name shorter than its field
    enum kind kind = kind_of(param);
    v->present = (kind != OPTIONAL_TENSOR && kind != OPTIONAL_DTYPE) || slot;
    if (!v->present)
        return 0;
    slot = value_slot(kind, slot);
    switch (kind) {
    case TENSOR:
    case OPTIONAL_TENSOR:
        return unpack_tensor(slot, v, error);
    case STRING:
        return torch_string_c_str(pointer_of(slot), &v->text) ? mx_fail(error, "%s is no string", v->name) : 0;
    case BOOL:
        v->number = (slot & 0xff) != 0;
        return 0;
    case OPTIONAL_DTYPE:
        v->number = (int32_t)(uint32_t)slot;
        return 0;
    }
    return 0;
}

static void release(const char *param, StableIValue slot) {
    enum kind kind = kind_of(param);
    bool optional = kind == OPTIONAL_TENSOR || kind == OPTIONAL_DTYPE;
    if (optional && !slot)
        return;
    StableIValue held = value_slot(kind, slot);
    if (kind == TENSOR || kind == OPTIONAL_TENSOR)
        aoti_torch_delete_tensor_object(pointer_of(held));
    if (kind == STRING)
        torch_delete_string(pointer_of(held));
    if (optional)
        mx_cxx_delete(pointer_of(slot));
}

// A boxed kernel owns its arguments. They are released before an error is raised, since raising does not return.
static void run_op(const struct op *op, StableIValue *stack) {
    struct value in[MAX_PARAMS] = {};
    AtenTensorHandle out[MAX_OUTPUTS] = {};
    struct mx_error error = {};
    int count = 0, failed = 0;
    for (int i = 0; op->params[i]; i++) {
        if (op->params[i][0] == '*')
            continue;
        failed = failed || unpack(op->params[i], stack[count], &in[count], &error);
        count++;
    }
    failed = failed || op->run(in, out, &error);
    count = 0;
    for (int i = 0; op->params[i]; i++)
        if (op->params[i][0] != '*')
            release(op->params[i], stack[count++]);
    for (int i = 0; i < op->outputs; i++) {
        if (failed && out[i])
            aoti_torch_delete_tensor_object(out[i]);
        stack[i] = (StableIValue)(uintptr_t)out[i];
    }
    if (failed) {
        char message[sizeof error.text + 64];
        snprintf(message, sizeof message, "mxfp8::%.*s: %s", (int)strcspn(op->name, "."), op->name, error.text);
        aoti_torch_check(false, op->name, "mxfp8", 0, message);
    }
}

// ------------------------------------------------------------------------------------------------------------ table

#define OFFS_OPERANDS(a, b) "Tensor " a, "Tensor " a "_scale", "Tensor " b, "Tensor " b "_scale", "Tensor offs", "*"

// X(C name, torch name, returns, number of outputs, parameters...)
#define OPS(X)                                                                                                         \
    X(quantize_rows, "quantize_rows", "(Tensor data, Tensor scale)", 2, "Tensor x", "str rounding=\"rceil\"")          \
    X(quantize_cols, "quantize_cols", "(Tensor data_t, Tensor scale_t)", 2, "Tensor x", "Tensor? offs=None",           \
      "str rounding=\"rceil\"")                                                                                        \
    X(quantize_both, "quantize_both", "(Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)", 4, "Tensor x",     \
      "Tensor? offs=None", "str rounding=\"rceil\"")                                                                   \
    X(zero_padding, "zero_padding_", "()", 0, "Tensor(a!) data", "Tensor(b!) scale", "Tensor offs")                    \
    X(grouped_mm, "grouped_mm", "Tensor", 1, OFFS_OPERANDS("a", "b"), "Tensor? bias=None",                             \
      "ScalarType? out_dtype=None")                                                                                    \
    X(grouped_mm_dgrad, "grouped_mm_dgrad", "Tensor", 1, OFFS_OPERANDS("dy", "wt"), "ScalarType? out_dtype=None")      \
    X(grouped_mm_wgrad, "grouped_mm_wgrad", "Tensor", 1, OFFS_OPERANDS("dyt", "xt"), "bool plain=False",               \
      "ScalarType? out_dtype=None")                                                                                    \
    X(grouped_mm_wgrad_accumulate, "grouped_mm_wgrad.accumulate", "()", 0, OFFS_OPERANDS("dyt", "xt"),                 \
      "Tensor(a!) main_grad", "bool plain=False")

#define DEFINE_OP(fn, op_name, result, count, ...)                                                                     \
    static const struct op fn##_op = {                                                                                 \
        .name = (op_name), .params = {__VA_ARGS__}, .returns = (result), .outputs = (count), .run = (fn)};             \
    static void fn##_boxed(StableIValue *stack, uint64_t inputs, uint64_t outputs) {                                   \
        (void)inputs, (void)outputs;                                                                                   \
        run_op(&fn##_op, stack);                                                                                       \
    }
OPS(DEFINE_OP)

static int define(TorchLibraryHandle library, const struct op *op) {
    char schema[512];
    size_t used = (size_t)snprintf(schema, sizeof schema, "%s(", op->name);
    for (int i = 0; op->params[i]; i++)
        used += (size_t)snprintf(schema + used, sizeof schema - used, i ? ", %s" : "%s", op->params[i]);
    snprintf(schema + used, sizeof schema - used, ") -> %s", op->returns);
    return aoti_torch_library_def(library, schema);
}

// Registers every op for CPU and CUDA tensors. Called once, by mxfp8_moe/ops.py. The library handles live as long as
// the process, as torch requires. Nonzero on failure.
[[gnu::visibility("default")]] int mxfp8_register_ops(void) {
    static const struct {
        const struct op *op;
        void (*boxed)(StableIValue *, uint64_t, uint64_t);
    } ops[] = {
#define OP_ENTRY(fn, ...) {&fn##_op, fn##_boxed},
        OPS(OP_ENTRY)
#undef OP_ENTRY
    };
    static const char *const keys[] = {"CPU", "CUDA"};
    TorchLibraryHandle library;
    int failed = aoti_torch_library_init_fragment("mxfp8", "mxfp8", 0, &library);
    for (size_t i = 0; !failed && i < sizeof ops / sizeof ops[0]; i++)
        failed = define(library, ops[i].op);
    for (size_t k = 0; !failed && k < sizeof keys / sizeof keys[0]; k++) {
        failed = aoti_torch_library_init_impl("mxfp8", keys[k], "mxfp8", 0, &library);
        for (size_t i = 0; !failed && i < sizeof ops / sizeof ops[0]; i++)
            failed = torch_library_impl(library, ops[i].op->name, ops[i].boxed, TORCH_ABI_2_11);
    }
    return failed;
}
