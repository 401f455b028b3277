/* Semantics of instructions: a handler for every line of insts.def, and the operand drivers that call them. */
#ifndef EMU_EXEC_H
#define EMU_EXEC_H

#include "wave.h"

struct emu_salu { /* scalar semantics: a, b in; d preloaded with the old destination; scc in and out */
    struct emu_wave *w;
    const struct emu_inst *i;
    uint64_t a, b, d;
    bool scc;
};
struct emu_vctx { /* vector semantics on whole registers: s[n] points at dwords x 64 lanes */
    struct emu_wave *w;
    const struct emu_inst *i;
    const emu_u32v *s[3];
    emu_u32v d[2]; /* preloaded with the old destination where the op reads it */
    uint64_t exec, cin, mask;
    emu_u32v tmp[3][2];
};
typedef void emu_salu_fn(struct emu_salu *);
typedef void emu_lane_fn(struct emu_vctx *);
typedef bool emu_run_fn(struct emu_wave *, const struct emu_inst *); /* false: stopped */

#define S(enc, opcode, name, operands, h, arg) emu_salu_fn emu_s_##h;
#define V(enc, opcode, name, operands, h, flags, arg) emu_lane_fn emu_v_##h;
#define R(enc, opcode, name, operands, h, flags, arg) emu_run_fn emu_r_##h;
#include "insts.def"
#undef S
#undef V
#undef R

bool emu_exec_salu(struct emu_wave *w, const struct emu_inst *i, emu_salu_fn *f);
bool emu_exec_valu(struct emu_wave *w, const struct emu_inst *i, emu_lane_fn *f);
/* *out = *i with the registers that the wave's GPR index mode moves; false when it stops */
bool emu_index_registers(struct emu_wave *w, const struct emu_inst *i, struct emu_inst *out);

#endif
