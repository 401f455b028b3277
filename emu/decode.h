/* Decoded instructions: what insts.def says of each, its operands, modifiers and register runs; their text. */
#ifndef EMU_DECODE_H
#define EMU_DECODE_H

#include <stddef.h>
#include <stdint.h>

enum { EMU_VCC = 106, EMU_M0 = 124, EMU_EXEC = 126 }; /* SGPRs by their operand code: 0-101, then special ones */

enum emu_enc : uint8_t {
    ENC_SOP1,
    ENC_SOP2,
    ENC_SOPK,
    ENC_SOPC,
    ENC_SOPP,
    ENC_SMEM,
    ENC_VOP1,
    ENC_VOP2,
    ENC_VOPC,
    ENC_VOP3,
    ENC_VOP3P,
    ENC_MFMA,
    ENC_DS,
    ENC_MUBUF,
    ENC_FLAT,
    ENC_GLOBAL,
    ENC_SCRATCH,
    ENC_COUNT
};

enum emu_file : uint8_t { EMU_NONE, EMU_SGPR, EMU_VGPR, EMU_CONST, EMU_SPECIAL };

struct emu_operand {
    enum emu_file file;
    uint8_t dwords;
    char type;      /* see insts.def */
    bool acc;       /* an AGPR */
    uint16_t reg;   /* SGPR number, or physical VGPR (AGPRs start at accum_offset) */
    uint16_t index; /* register number as written in assembly */
    uint16_t code;  /* source field as encoded */
    uint64_t value; /* constant */
};

enum emu_role : uint8_t { ROLE_VALU, ROLE_A, ROLE_B, ROLE_C, ROLE_SCALE, ROLE_MEM, ROLE_LANESEL, ROLE_MASK };
struct emu_regs { /* a run of registers an instruction touches */
    uint16_t reg;
    uint8_t n;
    enum emu_role role;
    bool vector;
};

enum emu_form : uint8_t { FORM_PLAIN, FORM_E64, FORM_SDWA, FORM_DPP };

struct emu_op;
struct emu_inst {
    const struct emu_op *op;
    uint32_t words[4];
    uint32_t pc; /* byte offset from the kernel's entry */
    uint8_t nwords;
    enum emu_form form;
    uint8_t ndst, nsrc, nreads, nwrites;
    struct emu_operand dst[2], src[5];
    struct emu_regs reads[10], writes[4];
    /* vector modifiers */
    uint8_t neg, abs, neg_hi, opsel, opsel_hi, omod;
    bool clamp;
    uint8_t cbsz, blgp, bitop3;
    uint16_t dpp_ctrl;
    uint8_t row_mask, bank_mask;
    bool bound_ctrl;
    uint8_t dst_sel, dst_unused, src_sel[2];
    bool src_sext[2];
    /* scalar */
    uint16_t simm;
    /* memory */
    int32_t offset;
    uint8_t offset0, offset1;
    bool offen, idxen, lds, sc0, sc1, nt, gds, soffset_en, imm_en;
    struct emu_operand saddr, soffset;
    char fault[96]; /* decoding failed: why; the instruction stops when reached */
};

enum emu_flag : uint32_t {
    OPF_NOSUFFIX = 1, /* assembly name has no _e32/_e64 */
    OPF_TRANS = 2,    /* transcendental unit: one wait state to a non-trans VALU */
    OPF_READS_D = 4,  /* destination is also a source */
    OPF_HALF = 8,     /* writes half a register by op_sel[3], keeps the other half */
    OPF_LANESEL = 16, /* reads lanes of a VGPR as scalar */
    OPF_SWAP = 32,    /* v_permlane*_swap */
    OPF_NODSTSEL = 64,
    OPF_DIVFMAS = 128,
    OPF_CMPX = 256,
    OPF_STORE = 512,
    OPF_D16 = 1024, /* loads half a register, keeps the other half */
    OPF_VOP3B = 2048,
    OPF_OPSEL = 4096, /* op_sel picks a half of a 32-bit source */
    OPF_ATOMIC = 8192,
    OPF_CLAMP = 16384, /* of integers: saturates */
};

enum emu_kind : uint8_t { KIND_S, KIND_V, KIND_R }; /* of a line of insts.def */
struct emu_op {
    const char *name;
    enum emu_kind kind;
    enum emu_enc enc;
    uint16_t opcode;
    const char *operands;
    uint32_t flags;
    int32_t arg;
};
/* the lines of insts.def in their order */
size_t emu_op_table(const struct emu_op **table);

/* not a move from or to an AGPR */
static inline bool emu_is_matrix(const struct emu_inst *i) { return i->op->enc == ENC_MFMA && i->op->kind == KIND_R; }

struct emu_decode_env {
    unsigned accum_offset, vgprs, sgprs; /* limits from the kernel descriptor */
};
bool emu_decode(const uint32_t *words, size_t left, const struct emu_decode_env *env, struct emu_inst *out);
/* disasm.c: text as llvm-objdump writes it, without the comment */
void emu_disasm(const struct emu_inst *i, char *text, size_t size);

#endif
