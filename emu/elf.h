/* Code objects as loaded: kernels with their decoded text. */
#ifndef EMU_ELF_H
#define EMU_ELF_H

#include "base.h"
#include "decode.h"

enum { EMU_LDS_MAX = 163840 };

struct emu_arg {
    uint32_t offset, size;
    char kind[40];
};
struct emu_stat { /* of one instruction of a kernel, over all waves */
    uint64_t hits;
    uint64_t vm, lgkm; /* s_waitcnt: accesses that it found in flight and waited for */
};
static inline void emu_add_stat(struct emu_stat *to, const struct emu_stat *more) {
    to->hits += more->hits;
    to->vm += more->vm;
    to->lgkm += more->lgkm;
}
struct emu_kernel {
    char name[256];
    uint32_t group_segment, private_segment, kernarg_size, max_flat_wg;
    uint32_t rsrc1, rsrc2, rsrc3, props, preload;
    uint64_t entry, code_bytes; /* addresses inside the loaded image */
    struct emu_arg *args;
    unsigned nargs;
    struct emu_decode_env env;
    uint32_t *index; /* code_bytes/4 entries: instruction number + 1, 0 = not a boundary */
    struct emu_inst *insts;
    struct emu_stat *stats; /* since the module was loaded */
    char refusal[160];      /* why it cannot be launched: something it asks for is not modelled */
    uint32_t ninsts;
};
struct emu_module {
    uint8_t *image; /* PT_LOADs at their addresses */
    size_t bytes;
    uint64_t segments[16]; /* bases of the registered ones */
    unsigned nsegments;
    struct emu_kernel *kernels;
    unsigned nkernels;
};
struct emu_module *emu_module_load(const void *elf, struct emu_error *e);
void emu_module_free(struct emu_module *m);

#endif
