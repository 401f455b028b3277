// torch.ops.mxfp8.*: schemas, argument checks, allocation of outputs, and the call into a backend. Plain C on
// libtorch's stable C ABI, so one binary serves every torch from 2.11 on, CPU, CUDA and ROCm builds alike.
//
// An op is one line of `OPS` below: its parameters and results, each with a rule. By the rules,
// `run_op` checks the arguments and allocates the results, and ops.py does both for tensors without data; so an op's
// function gets arguments that are right, by the names that the line gives them.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "mxfp8.h"
#include "torch_abi.h"

enum { MAX_PARAMS = 8, MAX_OUTPUTS = 4, MAX_DIM = 3 };

// A type rule: dtypes, or the values of a string. Of two dtypes of a result, out_dtype chooses; the first by default.
struct type {
    const char *text; // their names, " or " between them
    int32_t (*dtypes[2])(void);
};

// A parameter or a result: its words in the schema, and its rules.
//
// A shape rule lists axes, "[M, Kc/32]". A letter is an extent: the first argument that has it sets it, for all.
// After the letter, c: rounded up to whole blocks (what sets it must be whole blocks already); p: to mx_padded_tokens
// of E groups; /32: in blocks. " or " separates forms, of which the first argument's rank takes one, at the same place
// in every rule that has several. The form "None" is not to be given.
struct param {
    const char *kind, *name; // "*" without a name starts the keyword-only ones
    const struct type *type; // null for a bool
    const char *shape;       // null for what is no tensor
    const char *preset;      // or null
};

struct value {
    const char *name; // the parameter's; null past the last
    bool present;     // false for an optional that was not given
    // Tensor
    AtenTensorHandle handle;
    void *data;
    int64_t dim;
    int64_t *sizes, *strides; // of arguments
    int32_t dtype, device_type, device_index;
    // str, bool and ScalarType
    const char *text;
    int32_t number; // of a string: which of its type's values
};

struct op {
    const char *name; // with overload name
    int (*run)(const struct value *in, const struct value *out, struct mx_error *error);
    struct param params[MAX_PARAMS + 1], results[MAX_OUTPUTS + 1];
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

// Errors of arguments, for ops.py as well.
#define TEXTS(X)                                                                                                       \
    X(TYPE, "%s must be %s, got %s")                                                                                   \
    X(MISSING, "%s must be %s %s for a %d-D %s, got None")                                                             \
    X(UNWANTED, "%s must be None for a %d-D %s, got a tensor")                                                         \
    X(DEVICE, "%s must be on %s like %s, got %s")                                                                      \
    X(RANK, "%s must have shape %s, got %s")                                                                           \
    X(EXTENT, "%s must have shape %s with the %c of %s, got %s")                                                       \
    X(BLOCKS, "%s must have a last axis that is a multiple of %d, got shape %s")                                       \
    X(CONTIGUOUS, "%s must be contiguous, got shape %s with strides %s")
#define DEFINE_TEXT(name, text) static const char name##_TEXT[] = text;
TEXTS(DEFINE_TEXT)

// ---------------------------------------------------------------------------------------------------------- rules

static const char separator[] = " or ";

// What comes after the next separator; null if there is none.
static const char *after_separator(const char *rule) {
    const char *at = strstr(rule, separator);
    return at ? at + strlen(separator) : nullptr;
}

static int words_length(const char *rule) {
    const char *next = after_separator(rule);
    return (int)(next ? (size_t)(next - rule) - strlen(separator) : strlen(rule));
}

// Which of a type's words this is, or -1.
static int32_t position(const char *words, const char *word) {
    const size_t length = strlen(word);
    int32_t index = 0;
    for (const char *at = words; at; at = after_separator(at), index++)
        if (strcspn(at, " ") == length && memcmp(at, word, length) == 0)
            return index;
    return -1;
}

static bool has_dtype(const struct type *type, int32_t dtype) {
    return dtype == type->dtypes[0]() || (type->dtypes[1] && dtype == type->dtypes[1]());
}

struct axis {
    char letter, fill; // fill: c, p or 0
    bool blocks;
};

// Reads the axis at *at and moves on; false after a form's last one.
static bool next_axis(const char **at, struct axis *axis) {
    const char *c = *at;
    while (*c == '[' || *c == ',' || *c == ' ')
        c++;
    if (*c == ']')
        return false;
    *axis = (struct axis){.letter = *c++};
    if (*c == 'c' || *c == 'p')
        axis->fill = *c++;
    axis->blocks = *c == '/';
    while (*c != ',' && *c != ']')
        c++;
    *at = c;
    return true;
}

static int64_t rank_of(const char *form) {
    int64_t rank = 1;
    for (; *form != ']'; form++)
        rank += *form == ',';
    return rank;
}

// What the letters stand for, and the argument that said so.
struct extents {
    int form;
    struct {
        int64_t size;
        const struct value *from;
    } of['Z' - 'A' + 1];
};

static int64_t size_of(const struct extents *extents, struct axis axis) {
    int64_t size = extents->of[axis.letter - 'A'].size;
    if (axis.fill == 'c')
        size = mx_round_up(size, MX_BLOCK);
    if (axis.fill == 'p')
        size = mx_padded_tokens(size, extents->of['E' - 'A'].size);
    return axis.blocks ? size / MX_BLOCK : size;
}

// The form of a rule that the call has.
static const char *form_of(const char *rule, const struct extents *extents) {
    for (int i = 0; i < extents->form; i++) {
        const char *next = after_separator(rule);
        rule = next ? next : rule;
    }
    return rule;
}

// Which form of its rule the first argument has; 0 if none.
static int find_form(const struct value *first, const char *rule) {
    int form = 0;
    for (const char *at = rule; at; at = after_separator(at), form++)
        if (rank_of(at) == first->dim)
            return form;
    return 0;
}

// --------------------------------------------------------------------------------------------------------- checks

static int check_shape(const struct value *v, const char *rule, struct extents *extents, struct mx_error *error) {
    const char *form = form_of(rule, extents);
    if (v->dim != rank_of(form))
        return mx_fail(error, RANK_TEXT, v->name, rule, list_text(v->dim, v->sizes).chars);
    int64_t sizes[MAX_DIM], i = 0;
    struct axis axis, wrong = {};
    for (; next_axis(&form, &axis); i++) {
        if (!extents->of[axis.letter - 'A'].from) {
            extents->of[axis.letter - 'A'].from = v;
            extents->of[axis.letter - 'A'].size = v->sizes[i];
            if (axis.fill && v->sizes[i] % MX_BLOCK)
                return mx_fail(error, BLOCKS_TEXT, v->name, MX_BLOCK, list_text(v->dim, v->sizes).chars);
        }
        sizes[i] = size_of(extents, axis);
        if (sizes[i] != v->sizes[i] && !wrong.letter)
            wrong = axis;
    }
    if (wrong.letter)
        return mx_fail(error, EXTENT_TEXT, v->name, list_text(i, sizes).chars, wrong.letter,
                       extents->of[wrong.letter - 'A'].from->name, list_text(v->dim, v->sizes).chars);
    return 0;
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
            return mx_fail(error, CONTIGUOUS_TEXT, v->name, list_text(v->dim, v->sizes).chars,
                           list_text(v->dim, v->strides).chars);
        stride *= v->sizes[i];
    }
    return 0;
}

// An optional with one form may be left out; one with several goes by the form.
static int check_absent(const struct value *v, const struct param *param, const struct value *first,
                        const struct extents *extents, struct mx_error *error) {
    const char *form = form_of(param->shape, extents);
    if (*form != '[' || !after_separator(param->shape))
        return 0;
    struct text wanted;
    snprintf(wanted.chars, sizeof wanted.chars, "%.*s", words_length(form), form);
    return mx_fail(error, MISSING_TEXT, v->name, param->type->text, wanted.chars, (int)first->dim, first->name);
}

static int check_tensor(const struct value *v, const struct param *param, const struct value *first,
                        struct extents *extents, struct mx_error *error) {
    if (!v->present)
        return check_absent(v, param, first, extents, error);
    if (*form_of(param->shape, extents) != '[')
        return mx_fail(error, UNWANTED_TEXT, v->name, (int)first->dim, first->name);
    if (!has_dtype(param->type, v->dtype))
        return mx_fail(error, TYPE_TEXT, v->name, param->type->text, dtype_name(v->dtype));
    if (v->device_type != first->device_type || v->device_index != first->device_index)
        return mx_fail(error, DEVICE_TEXT, v->name, device_text(first).chars, first->name, device_text(v).chars);
    return check_shape(v, param->shape, extents, error) || check_contiguous(v, error);
}

static int check_scalar(struct value *v, const struct type *type, struct mx_error *error) {
    if (v->text)
        v->number = position(type->text, v->text);
    if (v->text && v->number < 0) {
        struct text quoted;
        snprintf(quoted.chars, sizeof quoted.chars, "'%s'", v->text);
        return mx_fail(error, TYPE_TEXT, v->name, type->text, quoted.chars);
    }
    if (!v->text && type && v->present && !has_dtype(type, v->number))
        return mx_fail(error, TYPE_TEXT, v->name, type->text, dtype_name(v->number));
    return 0;
}

// All that can be said of arguments before a backend is chosen.
static int check(const struct op *op, struct value *in, struct extents *extents, struct mx_error *error) {
    struct value *v = in;
    extents->form = find_form(in, op->params->shape);
    for (const struct param *param = op->params; param->kind; param++)
        if (param->name) {
            if (param->shape ? check_tensor(v, param, in, extents, error) : check_scalar(v, param->type, error))
                return 1;
            v++;
        }
    return 0;
}

// The argument or result of this name; one that is not present where the op has none.
static const struct value *named(const struct value *values, const char *name) {
    static const struct value absent;
    for (; values->name; values++)
        if (*values->name == *name && strcmp(values->name, name) == 0)
            return values;
    return &absent;
}

static int32_t type_of(const struct value *v) { return v->dtype == aoti_torch_dtype_float32() ? MX_F32 : MX_BF16; }

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

static int allocate_results(const struct op *op, const struct value *in, const struct extents *extents,
                            struct value *out, struct mx_error *error) {
    const struct value *out_dtype = named(in, "out_dtype");
    for (const struct param *result = op->results; result->kind; result++, out++) {
        int64_t sizes[MAX_DIM], dim = 0;
        struct axis axis;
        for (const char *form = form_of(result->shape, extents); next_axis(&form, &axis); dim++)
            sizes[dim] = size_of(extents, axis);
        const bool chosen = result->type->dtypes[1] && out_dtype->present;
        *out = (struct value){
            .name = result->name, .present = true, .dtype = chosen ? out_dtype->number : result->type->dtypes[0]()};
        if (allocate(dim, sizes, out->dtype, in, &out->handle, &out->data, error))
            return 1;
    }
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

// ------------------------------------------------------------------------------------------------------------- ops

static int quantize(const struct value *in, const struct value *out, struct mx_error *error) {
    const struct value *x = named(in, "x"), *offs = named(in, "offs");
    const struct value *data = named(out, "data"), *data_t = named(out, "data_t");
    const int64_t rows = x->sizes[x->dim - 2], cols = x->sizes[x->dim - 1];
    const int64_t groups = offs->present ? offs->sizes[0] : 0;
    const struct mx_quantize_args args = {
        .x = x->data,
        .offs = offs->data,
        .row_data = data->data,
        .row_scale = named(out, "scale")->data,
        .col_data = data_t->data,
        .col_scale = named(out, "scale_t")->data,
        .batch = x->dim == 3 ? x->sizes[0] : 1,
        .rows = rows,
        .cols = cols,
        .groups = groups,
        .row_k = mx_round_up(cols, MX_BLOCK),
        .col_k = offs->present ? mx_padded_tokens(rows, groups) : mx_round_up(rows, MX_BLOCK),
        .x_type = (int16_t)type_of(x),
        .wants = (data->present ? MX_ROWS : 0) | (data_t->present ? MX_COLS : 0),
        .grouped = offs->present,
        .rounding = named(in, "rounding")->number,
    };
    struct call call;
    if (begin(x, &call, error) || reserve(&call, call.backend->quantize_workspace(&args, &call.exec), x, error))
        return 1;
    return finish(&call, call.backend->quantize(&args, &call.exec, error));
}

static int zero_padding(const struct value *in, const struct value *, struct mx_error *error) {
    const struct value *data = named(in, "data"), *offs = named(in, "offs");
    const struct mx_padding_args args = {.data = data->data,
                                         .scale = named(in, "scale")->data,
                                         .offs = offs->data,
                                         .rows = data->sizes[0],
                                         .depth = data->sizes[1],
                                         .groups = offs->sizes[0]};
    struct call call;
    return begin(data, &call, error) || check_aligned(&call, data, error) ||
           call.backend->zero_padding(&args, &call.exec, error);
}

static int gemm_rows(const struct value *in, const struct value *out, struct mx_error *error) {
    const struct value *a = &in[0], *a_scale = &in[1], *b = &in[2], *b_scale = &in[3], *offs = &in[4]; // OPERANDS
    const struct mx_rows_args args = {.a = a->data,
                                      .a_scale = a_scale->data,
                                      .b = b->data,
                                      .b_scale = b_scale->data,
                                      .offs = offs->data,
                                      .bias = named(in, "bias")->data,
                                      .out = out->data,
                                      .m = a->sizes[0],
                                      .n = b->sizes[1],
                                      .k = a->sizes[1],
                                      .groups = b->sizes[0],
                                      .out_type = type_of(out)};
    struct call call;
    if (begin(a, &call, error) || check_aligned(&call, a, error) || check_aligned(&call, b, error) ||
        reserve(&call, call.backend->gemm_rows_workspace(&args, &call.exec), a, error))
        return 1;
    return finish(&call, call.backend->gemm_rows(&args, &call.exec, error));
}

static int gemm_depth(const struct value *in, const struct value *out, struct mx_error *error) {
    const struct value *a = &in[0], *a_scale = &in[1], *b = &in[2], *b_scale = &in[3], *offs = &in[4]; // OPERANDS
    const struct value *main_grad = named(in, "main_grad"), *target = main_grad->present ? main_grad : out;
    const struct mx_depth_args args = {.a = a->data,
                                       .a_scale = a_scale->data,
                                       .b = b->data,
                                       .b_scale = b_scale->data,
                                       .offs = offs->data,
                                       .out = target->data,
                                       .n = a->sizes[0],
                                       .k = b->sizes[0],
                                       .depth = a->sizes[1],
                                       .groups = offs->sizes[0],
                                       .out_type = type_of(target),
                                       .accumulate = main_grad->present,
                                       .plain = named(in, "plain")->number};
    struct call call;
    if (begin(a, &call, error) || check_aligned(&call, a, error) || check_aligned(&call, b, error) ||
        reserve(&call, call.backend->gemm_depth_workspace(&args, &call.exec), a, error))
        return 1;
    return finish(&call, call.backend->gemm_depth(&args, &call.exec, error));
}

// -------------------------------------------------------------------------------------------------- boxed arguments

enum kind { TENSOR, OPTIONAL_TENSOR, STRING, BOOL, OPTIONAL_DTYPE };

// By the words that there are: "Tensor", "Tensor(a!)", "Tensor?", "str", "bool" and "ScalarType?".
static enum kind kind_of(const struct param *param) {
    switch (param->kind[0]) {
    case 'T':
        return param->kind[strlen("Tensor")] == '?' ? OPTIONAL_TENSOR : TENSOR;
    case 's':
        return STRING;
    case 'b':
        return BOOL;
    default:
        return OPTIONAL_DTYPE;
    }
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

static int unpack(const struct param *param, StableIValue slot, struct value *v, struct mx_error *error) {
    v->name = param->name;
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

static void release(const struct param *param, StableIValue slot) {
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
    struct value in[MAX_PARAMS + 1] = {}, out[MAX_OUTPUTS + 1] = {};
    struct extents extents = {};
    struct mx_error error = {};
    int count = 0, failed = 0;
    for (const struct param *param = op->params; param->kind; param++)
        if (param->name) {
            failed = failed || unpack(param, stack[count], &in[count], &error);
            count++;
        }
    failed = failed || check(op, in, &extents, &error) || allocate_results(op, in, &extents, out, &error) ||
             op->run(in, out, &error);
    count = 0;
    for (const struct param *param = op->params; param->kind; param++)
        if (param->name)
            release(param, stack[count++]);
    for (int i = 0; op->results[i].kind; i++) {
        if (failed && out[i].handle)
            aoti_torch_delete_tensor_object(out[i].handle);
        stack[i] = (StableIValue)(uintptr_t)out[i].handle;
    }
    if (failed) {
        char message[sizeof error.text + 64];
        snprintf(message, sizeof message, "mxfp8::%.*s: %s", (int)strcspn(op->name, "."), op->name, error.text);
        aoti_torch_check(false, op->name, "mxfp8", 0, message);
    }
}

// ------------------------------------------------------------------------------------------------------------ table

static const struct type E4M3 = {"float8_e4m3fn", {aoti_torch_dtype_float8_e4m3fn}};
static const struct type E8M0 = {"float8_e8m0fnu", {torch_dtype_float8_e8m0fnu}};
static const struct type INT32 = {"int32", {aoti_torch_dtype_int32}};
static const struct type FLOAT32 = {"float32", {aoti_torch_dtype_float32}};
static const struct type FLOAT = {"bfloat16 or float32", {aoti_torch_dtype_bfloat16, aoti_torch_dtype_float32}};
#define OR_NAME(name, threshold) " or " #name
static const struct type ROUNDING = {.text = &(MX_ROUNDING_MODES(OR_NAME))[sizeof " or " - 1]};

#define LIST(...) {__VA_ARGS__}
#define KEYWORDS {.kind = "*"}
#define TENSOR(kind, name, type, shape) {kind, name, type, shape, nullptr}
#define OPERAND(name, shape)                                                                                           \
    TENSOR("Tensor", name, &E4M3, "[" shape "]"), TENSOR("Tensor", name "_scale", &E8M0, "[" shape "/32]")
#define COPY(t, tokens, weights)                                                                                       \
    TENSOR("Tensor", "data" t, &E4M3, "[" tokens "] or [" weights "]"),                                                \
        TENSOR("Tensor", "scale" t, &E8M0, "[" tokens "/32] or [" weights "/32]")
#define ROWS COPY("", "M, Kc", "E, N, Kc")
#define COLS COPY("_t", "K, Mp", "E, K, Nc")
#define X TENSOR("Tensor", "x", &FLOAT, "[M, K] or [E, N, K]")
#define OFFS TENSOR("Tensor", "offs", &INT32, "[E]")
#define OFFS_OR_NONE {"Tensor?", "offs", &INT32, "[E] or None", "None"}
#define ROUNDING_MODE {"str", "rounding", &ROUNDING, nullptr, "\"rceil\""}
#define DEPTH_OPERANDS OPERAND("dyt", "N, Tc"), OPERAND("xt", "K, Tc"), OFFS, KEYWORDS
#define BIAS {"Tensor?", "bias", &FLOAT32, "[E, N]", "None"}
#define PLAIN {"bool", "plain", nullptr, nullptr, "False"}
#define OUT_DTYPE {"ScalarType?", "out_dtype", &FLOAT, nullptr, "None"}
#define OUT(shape) TENSOR("Tensor", "", &FLOAT, shape)

// DO(name, torch's name, function, parameters, results)
#define OPS(DO)                                                                                                        \
    DO(quantize_rows, "quantize_rows", quantize, (X, ROUNDING_MODE), (ROWS))                                           \
    DO(quantize_cols, "quantize_cols", quantize, (X, OFFS_OR_NONE, ROUNDING_MODE), (COLS))                             \
    DO(quantize_both, "quantize_both", quantize, (X, OFFS_OR_NONE, ROUNDING_MODE), (ROWS, COLS))                       \
    DO(zero_padding, "zero_padding_", zero_padding,                                                                    \
       (TENSOR("Tensor(a!)", "data", &E4M3, "[N, Tc]"), TENSOR("Tensor(b!)", "scale", &E8M0, "[N, Tc/32]"), OFFS), ()) \
    DO(grouped_mm, "grouped_mm", gemm_rows,                                                                            \
       (OPERAND("a", "M, Kc"), OPERAND("b", "E, N, Kc"), OFFS, KEYWORDS, BIAS, OUT_DTYPE), (OUT("[M, N]")))            \
    DO(grouped_mm_dgrad, "grouped_mm_dgrad", gemm_rows,                                                                \
       (OPERAND("dy", "M, Nc"), OPERAND("wt", "E, K, Nc"), OFFS, KEYWORDS, OUT_DTYPE), (OUT("[M, K]")))                \
    DO(grouped_mm_wgrad, "grouped_mm_wgrad", gemm_depth, (DEPTH_OPERANDS, PLAIN, OUT_DTYPE), (OUT("[E, N, K]")))       \
    DO(grouped_mm_wgrad_accumulate, "grouped_mm_wgrad.accumulate", gemm_depth,                                         \
       (DEPTH_OPERANDS, TENSOR("Tensor(a!)", "main_grad", &FLOAT32, "[E, N, K]"), PLAIN), ())

#define DEFINE_OP(id, torch_name, function, parameters, returns)                                                       \
    static const struct op id##_op = {                                                                                 \
        .name = (torch_name), .run = (function), .params = LIST parameters, .results = LIST returns};                  \
    static void id##_boxed(StableIValue *stack, uint64_t inputs, uint64_t outputs) {                                   \
        (void)inputs, (void)outputs;                                                                                   \
        run_op(&id##_op, stack);                                                                                       \
    }
OPS(DEFINE_OP)

// All ops, and the kernels that torch calls.
static const struct {
    const struct op *op;
    void (*boxed)(StableIValue *, uint64_t, uint64_t);
} ops[] = {
#define OP_ENTRY(id, ...) {&id##_op, id##_boxed},
    OPS(OP_ENTRY)
#undef OP_ENTRY
};
enum { OP_COUNT = sizeof ops / sizeof ops[0] };

static void append_list(char *schema, size_t size, const struct param *list) {
    const struct param *first = list;
    append(schema, size, "(");
    for (; list->kind; list++) {
        append(schema, size, "%s%s", list == first ? "" : ", ", list->kind);
        if (list->name)
            append(schema, size, " %s", list->name);
        if (list->preset)
            append(schema, size, "=%s", list->preset);
    }
    append(schema, size, ")");
}

static int define(TorchLibraryHandle library, const struct op *op) {
    char schema[512];
    snprintf(schema, sizeof schema, "%s", op->name);
    append_list(schema, sizeof schema, op->params);
    append(schema, sizeof schema, " -> ");
    append_list(schema, sizeof schema, op->results);
    return aoti_torch_library_def(library, schema);
}

// The text of TEXTS by its name, for mxfp8_moe/ops.py; null if there is none.
[[gnu::visibility("default")]] const char *mxfp8_text(const char *name) {
#define RETURN_TEXT(key, text)                                                                                         \
    if (strcmp(name, #key) == 0)                                                                                       \
        return key##_TEXT;
    TEXTS(RETURN_TEXT)
#undef RETURN_TEXT
    return nullptr;
}

static const struct param *find_param(const struct param *list, const char *name) {
    for (; list->kind; list++)
        if (list->name && strcmp(list->name, name) == 0)
            return list;
    return nullptr;
}

// The rules of an op's parameter or result, for mxfp8_moe/ops.py: the type's words, or the shape. Null if it has none.
[[gnu::visibility("default")]] const char *mxfp8_rule(const char *op, const char *name, bool shape) {
    for (int i = 0; i < OP_COUNT; i++) {
        if (strcmp(ops[i].op->name, op) != 0)
            continue;
        const struct param *param = find_param(ops[i].op->params, name);
        if (!param)
            param = find_param(ops[i].op->results, name);
        if (param)
            return shape ? param->shape : param->type ? param->type->text : nullptr;
    }
    return nullptr;
}

// Registers every op for CPU and CUDA tensors. Called once, by mxfp8_moe/ops.py. The library handles live as long as
// the process, as torch requires. Nonzero on failure.
[[gnu::visibility("default")]] int mxfp8_register_ops(void) {
    static const char *const keys[] = {"CPU", "CUDA"};
    TorchLibraryHandle library;
    int failed = aoti_torch_library_init_fragment("mxfp8", "mxfp8", 0, &library);
    for (size_t i = 0; !failed && i < OP_COUNT; i++)
        failed = define(library, ops[i].op);
    for (size_t k = 0; !failed && k < sizeof keys / sizeof keys[0]; k++) {
        failed = aoti_torch_library_init_impl("mxfp8", keys[k], "mxfp8", 0, &library);
        for (size_t i = 0; !failed && i < OP_COUNT; i++)
            failed = torch_library_impl(library, ops[i].op->name, ops[i].boxed, TORCH_ABI_2_11);
    }
    return failed;
}
